"""The plain twin of all attention backends: one document at a time, full scores, softmax in fp32 (fp64 for fp64).

Shapes: T tokens, L queries and M keys of one document, H query heads, G key/value heads, R = H / G, C channels of a
head, of values too unless they have others.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from xorl.kernels.attention.kernel import AttentionSpec, Documents, Gradients, lse_dtype
from xorl.kernels.attention.operator import PackedAttention


def eager_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    key_documents: Documents,
    spec: AttentionSpec,
    *,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """`ForwardKernel` by the formula; its memory grows with the square of the longest document's length."""
    out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=lse_dtype(q.dtype), device=q.device)
    for rows, keys in zip(_rows(documents), _rows(key_documents), strict=True):
        q_doc, k_doc, v_doc = (_heads_first(x, k.shape[1]) for x in (q[rows], k[keys], v[keys]))
        scores = _scores(q_doc * spec.scale, k_doc, len(out[rows]), spec)  # [H, L, M]
        log_weights = scores.log_softmax(dim=-1)
        # Read from the diagonal, where scores are finite because a token always sees itself.
        diagonal = {"offset": scores.shape[2] - scores.shape[1], "dim1": 1, "dim2": 2}
        lse[:, rows] = scores.diagonal(**diagonal) - log_weights.diagonal(**diagonal)
        out[rows] = _tokens_first(_group_heads(log_weights.exp_(), k_doc) @ v_doc, like=out)
    return out, lse


def eager_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Documents,
    key_documents: Documents,
    spec: AttentionSpec,
    *,
    deterministic: bool,
) -> Gradients:
    """`BackwardKernel`: with P = exp(S - lse) and S the scores, dS = P * (dO V' - rowsum(dO * O)).

    Before the cap, it is this times the cap's derivative.
    """
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for rows, keys in zip(_rows(documents), _rows(key_documents), strict=True):
        grad_doc, q_doc, out_doc = (_heads_first(x[rows], k.shape[1]) for x in (grad_out, q, out))
        k_doc, v_doc = (_heads_first(x[keys], k.shape[1]) for x in (k, v))
        q_doc = q_doc * spec.scale
        scores = _scores(q_doc, k_doc, len(out[rows]), spec)
        # Where a query does not see a key, the slope is 0.
        slope = None if spec.softcap is None else 1 - (scores.clamp(min=-spec.softcap) / spec.softcap).square()
        weights = _group_heads(scores.sub_(lse[:, rows, None]).exp_(), k_doc)  # [G, R * L, M]
        grad_v[keys] = _tokens_first(weights.transpose(1, 2) @ grad_doc, like=v)
        delta = (grad_doc * out_doc).sum(dim=-1, keepdim=True)  # [G, R * L, 1]
        grad_scores = (grad_doc @ v_doc.transpose(1, 2)).sub_(delta).mul_(weights)
        if slope is not None:
            grad_scores *= _group_heads(slope, k_doc)
        grad_q[rows] = _tokens_first((grad_scores @ k_doc).mul_(spec.scale), like=q)
        grad_k[keys] = _tokens_first(grad_scores.transpose(1, 2) @ q_doc, like=k)
    return grad_q, grad_k, grad_v


eager_attention = PackedAttention("eager", eager_forward, eager_backward, caps_scores=True, takes_any_values=True)


def causal_mask(length: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """[L, M] bool: whether query i, the (M - L + i)th token of its document, sees key j."""
    positions = torch.arange(num_keys, device=device)
    distance = positions[num_keys - length :, None] - positions[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _rows(documents: Documents) -> Iterator[slice]:
    return (slice(begin, end) for begin, end in pairwise(documents.offsets.tolist()))


def _heads_first(x: Tensor, num_kv_heads: int) -> Tensor:
    """[L, H, C] -> [G, R * L, C] in the softmax dtype; concatenates the R heads that read one key/value head."""
    return x.to(lse_dtype(x.dtype)).transpose(0, 1).reshape(num_kv_heads, -1, x.shape[-1])


def _tokens_first(x: Tensor, like: Tensor) -> Tensor:
    """[G, R * L, C] -> [L, H, C], with the number of heads of `like`."""
    return x.view(like.shape[1], -1, like.shape[2]).transpose(0, 1)


def _group_heads(x: Tensor, k: Tensor) -> Tensor:
    """[H, L, M] -> [G, R * L, M]."""
    return x.view(len(k), -1, x.shape[-1])


def _scores(q: Tensor, k: Tensor, length: int, spec: AttentionSpec) -> Tensor:
    """[H, L, M] products of (scaled) queries and keys, capped; -inf where a query does not see a key."""
    scores = (q @ k.transpose(1, 2)).view(-1, length, k.shape[1])
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    if not spec.causal:
        return scores
    return scores.masked_fill_(~causal_mask(length, k.shape[1], spec.window, q.device), float("-inf"))
