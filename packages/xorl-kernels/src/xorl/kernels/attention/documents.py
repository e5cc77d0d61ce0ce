"""Where the documents of a row begin and end, as attention kernels read it."""

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """Where the documents of some rows begin and end, as in `SequenceLayout`.

    Attributes:
        cu_seqlens: [N + 1] int32 on the device.
        offsets: the same as int64 on the host.
    """

    cu_seqlens: Tensor
    offsets: Tensor

    @property
    def longest(self) -> int:
        """The number of tokens of the longest document."""
        return int(self.offsets.diff().max())


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-sum-exps for q and k of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def copy_to(device: torch.device, values: Tensor) -> Tensor:
    """A copy on `device`, from pinned memory: with pageable memory the host would wait for all queued work."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
