"""Where Triton kernels can run, and how they are launched. Modules that hold kernels import Triton; ask here first."""

import importlib.util
import math
from functools import cache

# Of the GPU whose work is shared out below; on another the shares are a little too small or too large.
NUM_PROCESSORS = 132


@cache
def triton_refusal(device_type: str) -> str | None:
    """Why no Triton kernel can run on such a device, or None when one can."""
    if device_type != "cuda":
        return f"Triton kernels run on CUDA devices, this is {device_type}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def launch(kernel: object, grid: tuple[int, ...], *arguments: object, num_warps: int, **constants: object) -> None:
    """Launch a function that `triton.jit` has wrapped, over `grid`, whose first axis may be the longest."""
    kernel[grid](*arguments, num_warps=num_warps, **constants)  # pyright: ignore[reportIndexIssue] jit has no types


def power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, as the length of a block has to be."""
    return 1 << (number - 1).bit_length()


def rows_per_program(num_rows: int, programs_per_processor: int) -> int:
    """Rows that each program of a kernel with sums over rows takes, so that each processor has that many at most.

    Only the three leading bits of the number differ from zero, so that a kernel compiled for it serves many lengths.
    """
    rows = max(math.ceil(num_rows / (programs_per_processor * NUM_PROCESSORS)), 1)
    step = 1 << max(rows.bit_length() - 3, 0)
    return math.ceil(rows / step) * step
