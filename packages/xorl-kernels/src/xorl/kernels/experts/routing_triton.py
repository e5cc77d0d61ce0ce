"""The experts with the highest scores, in one pass over the scores. Plain twin: the sort in `routing.top_experts`."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from xorl.kernels.fused.device import launch, power_of_2

# Scores that a program holds at once.
MAX_SCORES = 4096


def top_experts(scores: Tensor, num_active: int) -> Tensor:
    """As `routing.top_experts`, for scores in fp32."""
    scores = scores.contiguous()
    num_tokens, num_experts = scores.shape
    ids = torch.empty(num_tokens, num_active, dtype=torch.int64, device=scores.device)
    block = power_of_2(num_experts)
    num_rows = max(MAX_SCORES // block, 1)
    if num_tokens:
        launch(
            _top_experts,
            (math.ceil(num_tokens / num_rows),),
            scores,
            ids,
            num_tokens,
            NUM_EXPERTS=num_experts,
            NUM_ACTIVE=num_active,
            NUM_ROWS=num_rows,
            BLOCK=block,
            num_warps=4,
        )
    return ids


@triton.jit(do_not_specialize=["num_tokens"])
def _top_experts(
    scores_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    num_tokens: tl.int64,  # pyright: ignore[reportInvalidTypeForm]  (Triton's way to pass a wide integer)
    NUM_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    tokens = tl.program_id(0).to(tl.int64) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    experts = tl.arange(0, BLOCK)
    is_inside = (tokens < num_tokens)[:, None] & (experts < NUM_EXPERTS)[None, :]
    offsets = tokens[:, None] * NUM_EXPERTS + experts[None, :]
    left = tl.load(scores_ptr + offsets, mask=is_inside, other=float("-inf"))
    for choice in range(NUM_ACTIVE):
        best = tl.max(left, axis=1)
        # Scores that are not numbers are equal to none; whatever is chosen for them has to be an expert.
        found = tl.min(tl.where(left == best[:, None], experts[None, :], NUM_EXPERTS - 1), axis=1)
        tl.store(ids_ptr + tokens * NUM_ACTIVE + choice, found.to(tl.int64), mask=tokens < num_tokens)
        left = tl.where(experts[None, :] == found[:, None], float("-inf"), left)
