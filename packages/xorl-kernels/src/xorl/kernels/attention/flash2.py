"""`flash_attention_2`: the package flash-attn. Importing this file imports it.

Shapes: T tokens, H query heads, G key/value heads, C channels of a head.
"""

import torch
from flash_attn.flash_attn_interface import (  # pyright: ignore[reportMissingImports]
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from torch import Tensor

from xorl.kernels.attention.kernel import AttentionSpec, Documents, Gradients
from xorl.kernels.attention.operator import PackedAttention
from xorl.kernels.attention.split import split_by_heads


def flash2_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    key_documents: Documents,
    spec: AttentionSpec,
    *,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """`ForwardKernel` using FlashAttention 2 (arXiv:2307.08691)."""
    out, lse, *_ = _flash_attn_varlen_forward(q, k, v, **_options(documents, key_documents, spec), return_softmax=False)
    return out, lse


def flash2_backward(
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
    """`BackwardKernel` using FlashAttention 2; if `deterministic`, it sums the gradient of q in a fixed order."""
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    _flash_attn_varlen_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse,
        grad_q,
        grad_k,
        grad_v,
        **_options(documents, key_documents, spec),
        deterministic=deterministic,
    )
    return grad_q, grad_k, grad_v


flash_attention_2 = PackedAttention(
    "flash_attention_2", flash2_forward, split_by_heads(flash2_backward), caps_scores=True, reads_lengths=False
)


def _options(documents: Documents, key_documents: Documents, spec: AttentionSpec) -> dict[str, object]:
    """The library's arguments. Its window does not count the query itself."""
    return {
        "cu_seqlens_q": documents.cu_seqlens,
        "cu_seqlens_k": key_documents.cu_seqlens,
        "max_seqlen_q": documents.longest,
        "max_seqlen_k": key_documents.longest,
        "dropout_p": 0.0,
        "softmax_scale": spec.scale,
        "causal": spec.causal,
        "window_size_left": -1 if spec.window is None else spec.window - 1,
        "window_size_right": -1 if spec.window is None else 0,
        "softcap": spec.softcap or 0.0,
        "alibi_slopes": None,
    }
