"""Where weights can be quantised and dequantised; the only file that imports the Triton kernels."""

from types import ModuleType
from typing import Literal, TypeAlias

import torch

from xorl.kernels.fused.device import triton_refusal

QuantFormat: TypeAlias = Literal["nf4", "nvfp4", "block_fp8"]

# GPUs of earlier capabilities have no instructions to convert E4M3, which two of the formats use.
E4M3_CAPABILITY = (8, 9)


def quant_refusal(quant_format: QuantFormat, device: torch.device) -> str | None:
    """The reason why weights of this format cannot be used on `device`, or None; a CPU can use them, slowly."""
    if device.type == "cpu":
        return None
    if (refusal := triton_refusal(device.type)) is not None:
        return refusal
    capability = torch.cuda.get_device_capability(device)
    if quant_format != "nf4" and capability < E4M3_CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(device), capability
        return (
            f"{quant_format} holds numbers in E4M3, which GPUs read from compute capability 8.9 on, and this {name} "
            f"has {major}.{minor}; use nf4"
        )
    return None


def blocks_triton() -> ModuleType:
    """The kernels. Triton is only imported for a GPU: torch builds without one may not have it."""
    from xorl.kernels.quant import blocks_triton as kernels  # noqa: PLC0415

    return kernels
