"""Adds up the partial sums of a kernel's programs in a fixed order, so that results are reproducible to the bit.

Shapes: P programs, D width.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from xorl.kernels.fused.device import launch, power_of_2

# Buffers are so small that only latency matters: a program reads 64 bytes of each row, and finishes a typical buffer in
# one or two rounds of loads.
COLUMNS = 16
MAX_ROWS = 512
NUM_WARPS = 8


def sum_of_programs(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over P of `partial` [P, D] (fp32, contiguous), rounded once: [D] of `dtype`."""
    num_rows, width = partial.shape
    out = torch.empty(width, dtype=dtype, device=partial.device)
    grid = (math.ceil(width / COLUMNS),)
    rows = min(MAX_ROWS, power_of_2(max(num_rows, 1)))
    # A power of two, so that few kernels are compiled; a loop up to `num_rows` would take half as long again.
    rounds = power_of_2(math.ceil(max(num_rows, 1) / rows))
    sizes = {"WIDTH": width, "ROWS": rows, "ROUNDS": rounds, "COLUMNS": COLUMNS}
    launch(_sum, grid, partial, out, num_rows, num_warps=NUM_WARPS, **sizes)
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _sum(
    partial_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: int,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROUNDS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < WIDTH
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for index in range(ROUNDS):
        rows = index * ROWS + tl.arange(0, ROWS)
        is_inside = (rows < num_rows)[:, None] & is_column[None, :]
        sums += tl.load(partial_ptr + rows[:, None] * WIDTH + columns[None, :], mask=is_inside, other=0.0)
    dtype = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue] it is a pointer
    tl.store(out_ptr + columns, tl.sum(sums, axis=0).to(dtype), mask=is_column)
