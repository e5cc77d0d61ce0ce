"""Sums vectors of any dtype in fp32, in one pass over memory. Plain twin: `reference.widened_sum_`."""

import math

import triton
import triton.language as tl
from torch import Tensor

from xorl.kernels.fused.device import launch

BLOCK = 2048
NUM_WARPS = 4


def widened_sum_(out: Tensor, first: Tensor, others: Tensor) -> Tensor:
    """out [n] fp32 = first [n] + others[0] + others[1] + ..., in that order, for others [K, n]; returns out.

    `out`, `first` and each row of `others` must be contiguous.
    """
    count = out.numel()
    if count:
        arguments = (out, first, others, count, others.stride(0))
        launch(
            _widened_sum,
            (math.ceil(count / BLOCK),),
            *arguments,
            NUM_OTHERS=len(others),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return out


@triton.jit
def _widened_sum(
    out_ptr: tl.tensor,
    first_ptr: tl.tensor,
    others_ptr: tl.tensor,
    count: tl.int64,  # pyright: ignore[reportInvalidTypeForm]
    stride: tl.int64,  # pyright: ignore[reportInvalidTypeForm]
    NUM_OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = index < count
    total = tl.load(first_ptr + index, mask=is_inside).to(tl.float32)
    for other in tl.static_range(NUM_OTHERS):  # pyright: ignore[reportGeneralTypeIssues]
        total += tl.load(others_ptr + other * stride + index, mask=is_inside).to(tl.float32)
    tl.store(out_ptr + index, total, mask=is_inside)
