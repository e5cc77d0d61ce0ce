"""The plain twin of all attention backends: one document at a time, full scores, softmax in fp32 (fp64 for fp64).

Shapes: T tokens, L tokens of one document, H query heads, G key/value heads, R = H / G, C channels of a head.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from xorl.kernels.attention.operator import Gradients, PackedAttention, lse_dtype


def eager_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    offsets: Tensor,
    *,
    scale: float,
    window: int | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """`ForwardKernel` by the formula; its memory grows with the square of the longest document's length."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=lse_dtype(q.dtype), device=q.device)
    for rows in documents(offsets):
        q_doc, k_doc, v_doc = (_heads_first(x[rows], k.shape[1]) for x in (q, k, v))
        scores = _scores(q_doc * scale, k_doc, window)  # [H, L, L]
        log_weights = scores.log_softmax(dim=-1)
        # Read from the diagonal, where scores are finite because a token always sees itself.
        lse[:, rows] = scores.diagonal(dim1=1, dim2=2) - log_weights.diagonal(dim1=1, dim2=2)
        out[rows] = _tokens_first(_group_heads(log_weights.exp_(), k_doc) @ v_doc, like=q)
    return out, lse


def eager_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    offsets: Tensor,
    *,
    scale: float,
    window: int | None,
    deterministic: bool,
) -> Gradients:
    """`BackwardKernel`: with P = exp(S - lse) and S the scaled scores, dS = P * (dO V' - rowsum(dO * O))."""
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for rows in documents(offsets):
        grad_doc, q_doc, k_doc, v_doc, out_doc = (_heads_first(x[rows], k.shape[1]) for x in (grad_out, q, k, v, out))
        q_doc = q_doc * scale
        weights = _group_heads(_scores(q_doc, k_doc, window).sub_(lse[:, rows, None]).exp_(), k_doc)  # [G, R * L, L]
        grad_v[rows] = _tokens_first(weights.transpose(1, 2) @ grad_doc, like=v)
        delta = (grad_doc * out_doc).sum(dim=-1, keepdim=True)  # [G, R * L, 1]
        grad_scores = (grad_doc @ v_doc.transpose(1, 2)).sub_(delta).mul_(weights)
        grad_q[rows] = _tokens_first((grad_scores @ k_doc).mul_(scale), like=q)
        grad_k[rows] = _tokens_first(grad_scores.transpose(1, 2) @ q_doc, like=k)
    return grad_q, grad_k, grad_v


eager_attention = PackedAttention("eager", eager_forward, eager_backward)


def documents(offsets: Tensor) -> Iterator[slice]:
    """The rows of each document, given the layout's `offsets`."""
    ends = offsets.tolist()
    return (slice(begin, end) for begin, end in pairwise(ends))


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """[L, L] bool: whether query i sees key j."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _heads_first(x: Tensor, num_kv_heads: int) -> Tensor:
    """[L, H, C] -> [G, R * L, C] in the softmax dtype; concatenates the R heads that read one key/value head."""
    return x.to(lse_dtype(x.dtype)).transpose(0, 1).reshape(num_kv_heads, -1, x.shape[-1])


def _tokens_first(x: Tensor, like: Tensor) -> Tensor:
    """[G, R * L, C] -> [L, H, C], with the number of heads of `like`."""
    return x.view(like.shape[1], -1, like.shape[2]).transpose(0, 1)


def _group_heads(x: Tensor, k: Tensor) -> Tensor:
    """[H, L, L] -> [G, R * L, L]."""
    return x.view(len(k), -1, x.shape[-1])


def _scores(q: Tensor, k: Tensor, window: int | None) -> Tensor:
    """[H, L, L] products of (scaled) queries and keys; -inf where a query does not see a key."""
    length = k.shape[1]
    scores = (q @ k.transpose(1, 2)).view(-1, length, length)
    return scores.masked_fill_(~causal_mask(length, window, q.device), float("-inf"))
