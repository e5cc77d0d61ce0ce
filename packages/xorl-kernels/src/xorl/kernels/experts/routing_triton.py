"""Choosing experts, and sums of routings over documents, in a few launches. Plain twins: the same names in `routing`.

Shapes: T tokens, E experts, K experts per token, N documents.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from xorl.kernels.fused.device import launch, power_of_2

# Scores that a program holds at once.
MAX_SCORES = 4096
# Tokens summed at once, as the first step to the sum of a document.
BLOCK = 64
# Experts that a program sums for a document.
MAX_COLUMNS = 32
NUM_WARPS = 4


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
            num_warps=NUM_WARPS,
        )
    return ids


def sum_routing(
    logits: Tensor, probabilities: Tensor, ids: Tensor, cu_seqlens: Tensor, num_real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `routing.sum_routing`, in fp32, and logsumexp(logits) [T], 0 for padding."""
    logits, probabilities, ids = logits.contiguous(), probabilities.contiguous(), ids.contiguous()
    (num_tokens, num_experts), num_active, num_documents = logits.shape, ids.shape[1], len(cu_seqlens) - 1
    lse = logits.new_empty(num_tokens)
    num_blocks, width = math.ceil(num_tokens / BLOCK), power_of_2(num_experts)
    of_blocks = (
        logits.new_empty(num_blocks, num_experts, dtype=torch.int32),
        logits.new_empty(num_blocks, num_experts, dtype=torch.float64),
        logits.new_empty(num_blocks, dtype=torch.float64),
    )
    given = probabilities, ids, cu_seqlens if num_real is None else num_real
    sizes = {"NUM_EXPERTS": num_experts, "NUM_ACTIVE": num_active, "HAS_PADDING": num_real is not None, "BLOCK": BLOCK}
    if num_blocks:
        num_rows = min(max(MAX_SCORES // width, 1), BLOCK)
        launch(
            _sum_blocks,
            (num_blocks,),
            logits,
            *given,
            lse,
            *of_blocks,
            num_tokens,
            **sizes,
            NUM_ROWS=num_rows,
            WIDTH=width,
            num_warps=NUM_WARPS,
        )
    counts = logits.new_empty(num_documents, num_experts, dtype=torch.int32)
    sums, squared_lse = logits.new_empty(num_documents, num_experts), logits.new_empty(num_documents)
    columns = min(width, MAX_COLUMNS)
    launch(
        _sum_documents,
        (num_documents, math.ceil(num_experts / columns)),
        *given,
        lse,
        cu_seqlens,
        *of_blocks,
        counts,
        sums,
        squared_lse,
        **sizes,
        COLUMNS=columns,
        num_warps=NUM_WARPS,
    )
    return counts, sums, squared_lse, lse


def sum_routing_backward(
    grad_sums: Tensor,
    grad_squared_lse: Tensor,
    probabilities: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    num_real: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gradients of `sum_routing` with respect to logits and probabilities, [T, E] each."""
    probabilities = probabilities.contiguous()
    num_tokens, num_experts = probabilities.shape
    num_documents = len(cu_seqlens) - 1
    grad_logits, grad_probabilities = torch.empty_like(probabilities), torch.empty_like(probabilities)
    width = power_of_2(num_experts)
    num_rows = max(MAX_SCORES // width, 1)
    if num_tokens:
        launch(
            _sum_routing_backward,
            (math.ceil(num_tokens / num_rows),),
            grad_sums.contiguous(),
            grad_squared_lse.contiguous(),
            probabilities,
            lse,
            cu_seqlens,
            cu_seqlens if num_real is None else num_real,
            grad_logits,
            grad_probabilities,
            num_tokens,
            num_documents,
            NUM_EXPERTS=num_experts,
            HAS_PADDING=num_real is not None,
            SEARCH_STEPS=(num_documents - 1).bit_length(),
            NUM_ROWS=num_rows,
            WIDTH=width,
            num_warps=NUM_WARPS,
        )
    return grad_logits, grad_probabilities


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


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_blocks(
    logits_ptr: tl.tensor,
    probabilities_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    num_real_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    num_tokens: tl.int64,  # pyright: ignore[reportInvalidTypeForm]  (Triton's way to pass a wide integer)
    NUM_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """The sums over blocks of BLOCK tokens, and the logsumexp of each token."""
    block = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, WIDTH)
    is_expert = experts < NUM_EXPERTS
    end = tl.load(num_real_ptr).to(tl.int64) if HAS_PADDING else num_tokens
    count, total, square = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.float64), tl.zeros([1], tl.float64)
    for start in range(0, BLOCK, NUM_ROWS):
        tokens = block * BLOCK + start + tl.arange(0, NUM_ROWS)
        is_real = tokens < tl.minimum(end, num_tokens)
        is_inside = is_real[:, None] & is_expert[None, :]
        offsets = tokens[:, None] * NUM_EXPERTS + experts[None, :]
        logits = tl.load(logits_ptr + offsets, mask=is_inside, other=float("-inf"))
        highest = tl.max(logits, axis=1)
        highest = tl.where(tl.abs(highest) < float("inf"), highest, 0.0)
        lse = tl.log(tl.sum(tl.exp(logits - highest[:, None]), axis=1)) + highest
        lse = tl.where(is_real, lse, 0.0)
        tl.store(lse_ptr + tokens, lse, mask=tokens < num_tokens)
        probabilities = tl.load(probabilities_ptr + offsets, mask=is_inside, other=0.0)
        total += tl.sum(_finite(probabilities).to(tl.float64), axis=0)
        square += tl.sum(_finite(lse * lse).to(tl.float64), axis=0)
        count += _count(ids_ptr, tokens, is_real, experts, NUM_ACTIVE)
    offsets = block * NUM_EXPERTS + experts
    tl.store(counts_ptr + offsets, count, mask=is_expert)
    tl.store(sums_ptr + offsets, total, mask=is_expert)
    tl.store(squares_ptr + block + tl.arange(0, 1), square)


@triton.jit
def _sum_documents(
    probabilities_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    num_real_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    cu_seqlens_ptr: tl.tensor,
    block_counts_ptr: tl.tensor,
    block_sums_ptr: tl.tensor,
    block_squares_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """A document's sums: of the whole blocks in it, and of the tokens before and after these."""
    document = tl.program_id(0).to(tl.int64)
    experts = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_expert = experts < NUM_EXPERTS
    start = tl.load(cu_seqlens_ptr + document).to(tl.int64)
    stop = tl.load(cu_seqlens_ptr + document + 1).to(tl.int64)
    end = tl.minimum(tl.load(num_real_ptr).to(tl.int64), stop) if HAS_PADDING else stop
    first, last = (start + BLOCK - 1) // BLOCK, stop // BLOCK
    count, total, square = tl.zeros([COLUMNS], tl.int32), tl.zeros([COLUMNS], tl.float64), tl.zeros([1], tl.float64)
    for at in range(first, last, BLOCK):
        blocks = at + tl.arange(0, BLOCK)
        is_block = blocks < last
        is_inside = is_block[:, None] & is_expert[None, :]
        offsets = blocks[:, None] * NUM_EXPERTS + experts[None, :]
        count += tl.sum(tl.load(block_counts_ptr + offsets, mask=is_inside, other=0), axis=0)
        total += tl.sum(tl.load(block_sums_ptr + offsets, mask=is_inside, other=0.0), axis=0)
        square += tl.sum(tl.load(block_squares_ptr + blocks, mask=is_block, other=0.0), axis=0)
    for side in tl.static_range(2):
        # Of a document that lies within one block, all tokens are on the first side.
        begin = start if side == 0 else tl.maximum(first, last) * BLOCK
        until = tl.minimum(end, first * BLOCK) if side == 0 else end
        tokens = begin + tl.arange(0, BLOCK)
        is_real = tokens < until
        offsets = tokens[:, None] * NUM_EXPERTS + experts[None, :]
        probabilities = tl.load(probabilities_ptr + offsets, mask=is_real[:, None] & is_expert[None, :], other=0.0)
        lse = tl.load(lse_ptr + tokens, mask=is_real, other=0.0)
        total += tl.sum(_finite(probabilities).to(tl.float64), axis=0)
        square += tl.sum(_finite(lse * lse).to(tl.float64), axis=0)
        count += _count(ids_ptr, tokens, is_real, experts, NUM_ACTIVE)
    offsets = document * NUM_EXPERTS + experts
    tl.store(counts_ptr + offsets, count, mask=is_expert)
    tl.store(sums_ptr + offsets, total.to(tl.float32), mask=is_expert)
    is_first = (tl.program_id(1) + tl.arange(0, 1)) == 0
    tl.store(squares_ptr + document + tl.arange(0, 1), square.to(tl.float32), mask=is_first)


@triton.jit(do_not_specialize=["num_tokens", "num_documents"])
def _sum_routing_backward(
    grad_sums_ptr: tl.tensor,
    grad_squares_ptr: tl.tensor,
    probabilities_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    cu_seqlens_ptr: tl.tensor,
    num_real_ptr: tl.tensor,
    grad_logits_ptr: tl.tensor,
    grad_probabilities_ptr: tl.tensor,
    num_tokens: tl.int64,  # pyright: ignore[reportInvalidTypeForm]  (Triton's way to pass a wide integer)
    num_documents: tl.int64,  # pyright: ignore[reportInvalidTypeForm]
    NUM_EXPERTS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    tokens = tl.program_id(0).to(tl.int64) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    experts = tl.arange(0, WIDTH)
    is_token, is_expert = tokens < num_tokens, experts < NUM_EXPERTS
    is_real = is_token
    if HAS_PADDING:
        is_real = is_token & (tokens < tl.load(num_real_ptr).to(tl.int64))
    # The last document that begins at or before the token, bit by bit.
    documents = tl.zeros([NUM_ROWS], tl.int64)
    for step in tl.static_range(SEARCH_STEPS):
        later = documents + (1 << (SEARCH_STEPS - 1 - step))
        exists = later < num_documents
        begin = tl.load(cu_seqlens_ptr + later, mask=exists, other=0).to(tl.int64)
        documents = tl.where(exists & (begin <= tokens), later, documents)
    scale = 2.0 * tl.load(lse_ptr + tokens, mask=is_token, other=0.0)
    scale *= tl.load(grad_squares_ptr + documents, mask=is_token, other=0.0)
    is_inside = is_token[:, None] & is_expert[None, :]
    offsets = tokens[:, None] * NUM_EXPERTS + experts[None, :]
    # The derivative of logsumexp is the softmax.
    probabilities = tl.load(probabilities_ptr + offsets, mask=is_inside, other=0.0)
    tl.store(grad_logits_ptr + offsets, scale[:, None] * probabilities, mask=is_inside)
    sources = grad_sums_ptr + documents[:, None] * NUM_EXPERTS + experts[None, :]
    grad = tl.load(sources, mask=is_real[:, None] & is_expert[None, :], other=0.0)
    tl.store(grad_probabilities_ptr + offsets, grad, mask=is_inside)


@triton.jit
def _count(
    ids_ptr: tl.tensor, tokens: tl.tensor, is_real: tl.tensor, experts: tl.tensor, NUM_ACTIVE: tl.constexpr
) -> tl.tensor:
    """How many of the `tokens` that are real chose each of the `experts`."""
    chosen = tl.zeros_like(is_real[:, None].to(tl.int32) + experts[None, :])
    for choice in tl.static_range(NUM_ACTIVE):
        ids = tl.load(ids_ptr + tokens * NUM_ACTIVE + choice, mask=is_real, other=-1)
        chosen += (ids[:, None] == experts[None, :]).to(tl.int32)
    return tl.sum(chosen, axis=0)


@triton.jit
def _finite(values: tl.tensor) -> tl.tensor:
    """The values, 0 in place of those that are not finite."""
    return tl.where(tl.abs(values) < float("inf"), values, 0.0)
