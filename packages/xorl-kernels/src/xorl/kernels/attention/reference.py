"""The plain twin of every attention backend: one document at a time, full scores, softmax in fp32 (fp64 for fp64).

Shapes: T tokens, L tokens of one document, H query heads, G key/value heads, C channels of a head.
"""

import torch
from torch import Tensor

from xorl.kernels.layout import SequenceLayout


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, *, scale: float, window: int | None
) -> Tensor:
    """`AttentionFn` written as the formula; memory grows with the square of the longest document."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    outputs = []
    for q_doc, k_doc, v_doc in zip(*(x.split(list(layout.lengths)) for x in (q, k, v)), strict=True):
        k_heads = k_doc.to(dtype).repeat_interleave(group, dim=1)  # [L, H, C]
        v_heads = v_doc.to(dtype).repeat_interleave(group, dim=1)  # [L, H, C]
        scores = torch.einsum("qhc,khc->hqk", q_doc.to(dtype), k_heads) * scale
        visible = causal_mask(q_doc.shape[0], window, q.device)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)  # [H, L, L]
        outputs.append(torch.einsum("hqk,khc->qhc", weights, v_heads).to(q.dtype))
    return torch.cat(outputs) if outputs else torch.empty_like(q)


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """[L, L] bool: may query i see key j."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
