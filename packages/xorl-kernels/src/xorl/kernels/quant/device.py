"""Checks where weights can be quantised and dequantised, and imports the Triton kernels that do it."""

from types import ModuleType
from typing import Literal, TypeAlias

import torch

from xorl.kernels.fused.device import triton_refusal

QuantFormat: TypeAlias = Literal["nf4", "nvfp4", "block_fp8"]

# Earlier GPUs have no instructions that convert E4M3, which two of the formats use.
E4M3_CAPABILITY = (8, 9)


def quant_refusal(quant_format: QuantFormat, device: torch.device) -> str | None:
    """The reason why weights of this format cannot be used on `device`, or None. On a CPU they are slow."""
    if device.type == "cpu":
        return None
    if (refusal := triton_refusal(device.type)) is not None:
        return refusal
    capability = torch.cuda.get_device_capability(device)
    if quant_format != "nf4" and capability < E4M3_CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(device), capability
        return (
            f"{quant_format} uses E4M3, which needs compute capability 8.9 or later, and this {name} has "
            f"{major}.{minor}; use nf4"
        )
    return None


def blocks_triton() -> ModuleType:
    """The module of the kernels, imported on first use: CPU builds of torch may not have Triton."""
    from xorl.kernels.quant import blocks_triton as kernels  # noqa: PLC0415

    return kernels
