"""Checks which requests and devices flash attention kernels support, without importing their libraries."""

from importlib.metadata import PackageNotFoundError, version

import torch

from xorl.kernels.attention.interface import AttentionRequest
from xorl.kernels.fused.device import missing_device

HALF_DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8

# Major compute capabilities.
AMPERE, HOPPER, BLACKWELL = 8, 9, 11


def flash_refusal(request: AttentionRequest, lowest: int, highest: int | None = None) -> str | None:
    """The reason why a kernel for major compute capabilities `lowest` to `highest` cannot serve a request, or None.

    Checks the common requirements of these kernels: CUDA, half precision, and a head_dim of up to 256 that is a
    multiple of 8.
    """
    if request.device_type != "cuda":
        return f"it needs a CUDA device, but the model runs on {request.device_type}"
    if request.dtype not in HALF_DTYPES:
        dtype = str(request.dtype).removeprefix("torch.")
        return f"it computes in float16 or bfloat16, but the model computes in {dtype}"
    if request.head_dim > MAX_HEAD_DIM or request.head_dim % HEAD_DIM_MULTIPLE:
        return (
            f"it needs a head_dim that is a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}, "
            f"but the model has {request.head_dim}"
        )
    if (missing := missing_device(request.device_type)) is not None:
        return missing
    major, minor = torch.cuda.get_device_capability()
    if major < lowest or (highest is not None and major > highest):
        known = f"{lowest}.0 and later" if highest is None else f"{lowest}.0 to {highest}.x"
        return f"it needs compute capability {known}, but this device has {major}.{minor}"
    return None


def uncapped_refusal(request: AttentionRequest) -> str | None:
    """The reason why a kernel without a cap on scores cannot serve a request, or None."""
    return (
        None if request.softcap is None else f"it does not cap scores, and the model caps them at {request.softcap:g}"
    )


def installed_version(distribution: str) -> str | None:
    """The version of an installed Python distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
