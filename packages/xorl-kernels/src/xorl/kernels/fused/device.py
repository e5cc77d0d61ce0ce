"""Checks whether Triton kernels can run, and launches them. Modules with kernels import Triton; this one does not."""

import importlib.util
import math
from functools import cache

import torch

# Streaming multiprocessors of an H100, for which the split of the work is tuned.
NUM_PROCESSORS = 132


def missing_device(device_type: str) -> str | None:
    """The reason why nothing can run on devices of this type, or None if one is there."""
    return "no CUDA device is visible" if device_type == "cuda" and not torch.cuda.is_available() else None


@cache
def triton_refusal(device_type: str) -> str | None:
    """The reason why no Triton kernel can run on this device, or None if one can."""
    if device_type != "cuda":
        return f"Triton kernels run on CUDA devices, not on {device_type}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def launch(kernel: object, grid: tuple[int, ...], *arguments: object, num_warps: int, **constants: object) -> None:
    """Launch a `triton.jit` function over `grid`. CUDA limits all axes but the first to 65,535 programs."""
    kernel[grid](*arguments, num_warps=num_warps, **constants)  # pyright: ignore[reportIndexIssue] jit has no types


def power_of_2(number: int) -> int:
    """`number` rounded up to a power of two, as block lengths must be."""
    return 1 << (number - 1).bit_length()


def rows_per_program(num_rows: int, programs_per_processor: int) -> int:
    """Rows per program for kernels that sum over rows, for at most `programs_per_processor` programs per processor.

    The result is rounded up to three significant bits, so that one compiled kernel serves many lengths.
    """
    rows = max(math.ceil(num_rows / (programs_per_processor * NUM_PROCESSORS)), 1)
    step = 1 << max(rows.bit_length() - 3, 0)
    return math.ceil(rows / step) * step
