"""Zeros for groups without rows, whose products torch's kernel leaves undefined; touches no other group."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from xorl.kernels.fused.device import launch

BLOCK = 16_384


def clear_empty_groups_(out: Tensor, ends: Tensor) -> None:
    """Set out[s] to 0 for each group s without rows; `out` is [S, N, K], contiguous, and `ends` [S] int32."""
    assert out.is_contiguous(), "the kernel computes addresses"
    size = out[0].numel() if len(out) else 0
    if size:
        num_blocks = math.ceil(size / BLOCK)
        launch(
            _clear_empty_groups,
            (len(out) * num_blocks,),
            out,
            ends,
            SIZE=size,
            NUM_BLOCKS=num_blocks,
            BLOCK=BLOCK,
            num_warps=8,
        )


@triton.jit
def _clear_empty_groups(
    out_ptr: tl.tensor, ends_ptr: tl.tensor, SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    group = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    if start == tl.load(ends_ptr + group):
        offsets = (tl.program_id(0) % NUM_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.zeros([BLOCK], out_ptr.dtype.element_ty)  # pyright: ignore[reportAttributeAccessIssue] a pointer
        tl.store(out_ptr + group * SIZE + offsets, zeros, mask=offsets < SIZE)
