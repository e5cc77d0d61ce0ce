"""Where Triton kernels can run, and how to launch them. Modules with kernels import Triton; check here first."""

import importlib.util
import math
from functools import cache

# Of the GPU that the work split is tuned for; on another one the parts are slightly too small or too large.
NUM_PROCESSORS = 132


@cache
def triton_refusal(device_type: str) -> str | None:
    """The reason why no Triton kernel can run on this device, or None if one can."""
    if device_type != "cuda":
        return f"Triton kernels run on CUDA devices, this is {device_type}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def launch(kernel: object, grid: tuple[int, ...], *arguments: object, num_warps: int, **constants: object) -> None:
    """Launch a `triton.jit` function over `grid`, whose first axis may be the longest."""
    kernel[grid](*arguments, num_warps=num_warps, **constants)  # pyright: ignore[reportIndexIssue] jit has no types


def power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`: block lengths must be powers of two."""
    return 1 << (number - 1).bit_length()


def rows_per_program(num_rows: int, programs_per_processor: int) -> int:
    """Rows per program for kernels that sum over rows, so that each processor gets at most that many programs.

    Only the three leading bits of the result are nonzero, so that one compiled kernel serves many lengths.
    """
    rows = max(math.ceil(num_rows / (programs_per_processor * NUM_PROCESSORS)), 1)
    step = 1 << max(rows.bit_length() - 3, 0)
    return math.ceil(rows / step) * step
