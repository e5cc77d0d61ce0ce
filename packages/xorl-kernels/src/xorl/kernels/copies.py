"""Copies from the host to a device."""

import torch
from torch import Tensor


def copy_to(device: torch.device, values: Tensor) -> Tensor:
    """A copy on `device`, from pinned memory: with pageable memory the host would wait for all queued work."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
