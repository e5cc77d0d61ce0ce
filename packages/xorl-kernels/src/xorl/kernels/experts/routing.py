"""Choosing experts, and sums of routings over documents; both deterministic and without a host synchronisation.

Shapes: T tokens, E experts, K experts per token, N documents, C columns.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from xorl.kernels.experts.plan import is_padding
from xorl.kernels.fused import triton_refusal

# Rows summed at once: a document is a range of whole blocks, and parts of the two at its ends.
BLOCK = 64


def top_experts(scores: Tensor, num_active: int) -> Tensor:
    """The experts with the highest scores [T, E], best first: [T, K] int64. Of equal scores, the lowest index wins.

    One operator without a gradient, so that recomputation can keep its output: a recomputed score may differ in its
    last bit, and tokens must not change their experts.
    """
    return _top_experts(scores, num_active)


@torch.library.custom_op("xorl::top_experts", mutates_args=())
def _top_experts(scores: Tensor, num_active: int) -> Tensor:
    if (kernels := _kernels(scores)) is not None:
        return kernels.top_experts(scores, num_active)
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :num_active].contiguous()


@_top_experts.register_fake
def _(scores: Tensor, num_active: int) -> Tensor:
    return scores.new_empty(scores.shape[0], num_active, dtype=torch.int64)


def in_best_groups(scores: Tensor, num_groups: int, num_active: int) -> Tensor:
    """The scores [T, E], -inf for experts that are not in the `num_active` best groups of their token.

    The experts are `num_groups` groups of equal size, in order. A group is as good as the sum of its two highest scores
    (arXiv:2412.19437, section 2.1.2).
    """
    grouped = scores.unflatten(-1, (num_groups, -1))  # [T, groups, E / groups]
    sums = grouped.topk(2, dim=-1).values.sum(-1)
    is_best = torch.zeros_like(sums, dtype=torch.bool).scatter_(-1, top_experts(sums, num_active), True)
    return grouped.masked_fill(~is_best[..., None], float("-inf")).flatten(-2)


class Routing(NamedTuple):
    """Sums over the tokens of each document, for the losses and statistics of routers. Padding is left out.

    counts: [N, E] int32, tokens that chose each expert.
    probabilities: [N, E] fp32, sums of routing probabilities; differentiable.
    squared_lse: [N] fp32, sums of logsumexp(logits)^2; differentiable.
    """

    counts: Tensor
    probabilities: Tensor
    squared_lse: Tensor


def sum_routing(
    logits: Tensor, probabilities: Tensor, ids: Tensor, cu_seqlens: Tensor, num_real: Tensor | None
) -> Routing:
    """Sum up the routing of one layer by document. Values that are not finite count as 0.

    Args:
        logits: [T, E] fp32 or fp64; only the sums of logsumexp are differentiated by them.
        probabilities: [T, E], their softmax; only its sums are differentiated by them.
        ids: [T, K] int64, the chosen experts.
        cu_seqlens: [N + 1] int32, the first token of each document, and T.
        num_real: 0-d integer tensor; tokens from this index on are padding. None: there is no padding.
    """
    counts, sums, squared_lse, _ = _sum_routing(logits, probabilities, ids, cu_seqlens, num_real)
    return Routing(counts, sums, squared_lse)


def replay_experts(ids: Tensor, recorded: Tensor) -> Tensor:
    """The experts of each token, [T, K] int64: the recorded ones, or `ids` for tokens without a record.

    Args:
        ids: [T, K] int64, the router's own choice.
        recorded: [T, K] integers, a token's all different; -1 for tokens without a record.
    """
    return torch.where(recorded[:, :1] >= 0, recorded.to(ids.dtype), ids)


def count_replayed(ids: Tensor, recorded: Tensor, cu_seqlens: Tensor, num_real: Tensor | None) -> Tensor:
    """[N, 2] int32: how many choices of each document were recorded, and how many the router would not have made.

    Arguments as for `replay_experts` and `sum_routing`.
    """
    num_tokens, num_active = ids.shape
    has_record = recorded[:, 0] >= 0
    if num_real is not None:
        has_record = has_record & ~is_padding(num_tokens, num_real)
    num_same = (recorded[:, :, None] == ids[:, None, :]).sum((1, 2))
    counts = torch.stack([torch.full_like(num_same, num_active), num_active - num_same], dim=1).to(torch.int32)
    counts = counts.masked_fill(~has_record[:, None], 0)
    documents = _document_ids(num_tokens, cu_seqlens)
    return counts.new_zeros(len(cu_seqlens) - 1, 2).index_add_(0, documents, counts)


@torch.library.custom_op("xorl::sum_routing", mutates_args=())
def _sum_routing(
    logits: Tensor, probabilities: Tensor, ids: Tensor, cu_seqlens: Tensor, num_real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The three sums, and logsumexp(logits) [T], 0 for padding."""
    if (kernels := _kernels(logits)) is not None:
        return kernels.sum_routing(logits, probabilities, ids, cu_seqlens, num_real)
    num_documents, num_experts = len(cu_seqlens) - 1, logits.shape[1]
    index = _document_ids(len(ids), cu_seqlens)[:, None] * num_experts + ids
    ones = torch.ones_like(ids, dtype=torch.int32)
    lse = logits.logsumexp(-1)
    # The sums are cumulative: NaN from a diverged model would reach later documents, which may belong to other models.
    values = torch.cat([probabilities, lse.square()[:, None]], dim=1).nan_to_num_(0, 0, 0)
    if num_real is not None:
        padding = is_padding(len(ids), num_real)
        ones, values = ones.masked_fill(padding[:, None], 0), values.masked_fill(padding[:, None], 0)
        lse = lse.masked_fill(padding, 0)
    # Integers: the order of the additions does not matter.
    counts = ones.new_zeros(num_documents * num_experts).scatter_add_(0, index.flatten(), ones.flatten())
    sums = sum_documents(values, cu_seqlens)
    return counts.view(num_documents, num_experts), sums[:, :-1].clone(), sums[:, -1].clone(), lse


@_sum_routing.register_fake
def _(
    logits: Tensor, probabilities: Tensor, ids: Tensor, cu_seqlens: Tensor, num_real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_documents, num_experts = cu_seqlens.shape[0] - 1, logits.shape[1]
    counts = logits.new_empty(num_documents, num_experts, dtype=torch.int32)
    sums = probabilities.new_empty(num_documents, num_experts)
    return counts, sums, logits.new_empty(num_documents), logits.new_empty(logits.shape[0])


@torch.library.custom_op("xorl::sum_routing_backward", mutates_args=())
def _sum_routing_backward(
    grad_sums: Tensor,
    grad_squared_lse: Tensor,
    probabilities: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    num_real: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if (kernels := _kernels(probabilities)) is not None:
        return kernels.sum_routing_backward(grad_sums, grad_squared_lse, probabilities, lse, cu_seqlens, num_real)
    documents = _document_ids(len(probabilities), cu_seqlens)
    grad_probabilities = grad_sums[documents]
    if num_real is not None:
        grad_probabilities.masked_fill_(is_padding(len(probabilities), num_real)[:, None], 0)
    # The derivative of logsumexp is the softmax.
    return (2 * lse * grad_squared_lse[documents])[:, None] * probabilities, grad_probabilities


@_sum_routing_backward.register_fake
def _(
    grad_sums: Tensor,
    grad_squared_lse: Tensor,
    probabilities: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    num_real: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return probabilities.new_empty(probabilities.shape), probabilities.new_empty(probabilities.shape)


def _save(
    ctx: FunctionCtx,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    output: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    _, probabilities, _, cu_seqlens, num_real = inputs
    ctx.save_for_backward(probabilities, output[3], cu_seqlens, num_real)  # pyright: ignore[reportArgumentType] takes None
    ctx.mark_non_differentiable(output[0], output[3])


def _differentiate(
    ctx: FunctionCtx, _: Tensor, grad_sums: Tensor, grad_squared_lse: Tensor, __: Tensor
) -> tuple[Tensor, Tensor, None, None, None]:
    saved: tuple[Tensor, Tensor, Tensor, Tensor | None] = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
    grad_logits, grad_probabilities = _sum_routing_backward(grad_sums, grad_squared_lse, *saved)
    return grad_logits, grad_probabilities, None, None, None


_sum_routing.register_autograd(_differentiate, setup_context=_save)


def sum_documents(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sums over the tokens of each document, in a fixed order: [T, C] to [N, C].

    Args:
        values: fp32 or fp64.
        cu_seqlens: [N + 1] int32, the first token of each document, and T.
    """
    num_tokens, num_columns = values.shape
    num_blocks = num_tokens // BLOCK + 1
    padded = values.new_zeros(num_blocks * BLOCK, num_columns)
    padded[:num_tokens] = values
    blocks = padded.view(num_blocks, BLOCK, num_columns)
    before = torch.zeros(num_blocks + 1, num_columns, dtype=torch.float64, device=values.device)
    torch.cumsum(blocks.sum(1, dtype=torch.float64), 0, out=before[1:])
    # The sum of all tokens before each boundary: of the blocks before its block, and of the rows before it there.
    boundaries = cu_seqlens.long()
    block = boundaries // BLOCK
    is_before = torch.arange(BLOCK, device=values.device) < (boundaries % BLOCK)[:, None]
    inside = blocks[block].masked_fill(~is_before[:, :, None], 0).sum(1, dtype=torch.float64)
    return (before[block] + inside).diff(dim=0).to(values.dtype)


def _kernels(scores: Tensor) -> ModuleType | None:
    """The module of kernels with the functions of this one, or None where they cannot run."""
    if scores.dtype != torch.float32 or triton_refusal(scores.device.type) is not None:
        return None
    from xorl.kernels.experts import routing_triton  # noqa: PLC0415 - needs Triton

    return routing_triton


def _document_ids(num_tokens: int, cu_seqlens: Tensor) -> Tensor:
    """[T] int64, the document of each token."""
    return torch.searchsorted(cu_seqlens, torch.arange(num_tokens, device=cu_seqlens.device), right=True) - 1
