"""`flash_attention_4`: the package flash-attn-4, for Hopper and Blackwell. Importing this file imports it.

The first call for each head_dim, dtype and kind of mask compiles a kernel, which takes 3-5 s, and caches it on disk.

Shapes: T tokens, H query heads, G key/value heads, C channels of a head.
"""

from flash_attn.cute.interface import (  # pyright: ignore[reportMissingImports]
    _flash_attn_bwd,
    _flash_attn_fwd,
)
from torch import Tensor

from xorl.kernels.attention.kernel import AttentionSpec, Documents, Gradients
from xorl.kernels.attention.operator import PackedAttention


def flash4_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    key_documents: Documents,
    spec: AttentionSpec,
    *,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """`ForwardKernel` using FlashAttention 4."""
    out, lse, *_ = _flash_attn_fwd(
        q, k, v, **_options(documents, key_documents, spec), softcap=spec.softcap, return_lse=True
    )
    return out, lse


def flash4_backward(
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
    """`BackwardKernel` using FlashAttention 4; if deterministic, thread blocks add to a gradient in a fixed order."""
    return _flash_attn_bwd(
        q,
        k,
        v,
        out,
        grad_out,
        lse,
        **_options(documents, key_documents, spec),
        softcap=spec.softcap or 0.0,
        deterministic=deterministic,
    )


flash_attention_4 = PackedAttention(
    "flash_attention_4", flash4_forward, flash4_backward, caps_scores=True, reads_lengths=False
)


def _options(documents: Documents, key_documents: Documents, spec: AttentionSpec) -> dict[str, object]:
    """The library's arguments. Its window does not count the query itself."""
    return {
        "cu_seqlens_q": documents.cu_seqlens,
        "cu_seqlens_k": key_documents.cu_seqlens,
        "max_seqlen_q": documents.longest,
        "max_seqlen_k": key_documents.longest,
        "softmax_scale": spec.scale,
        "causal": spec.causal and spec.window is None,
        "window_size_left": None if spec.window is None else spec.window - 1,
        "window_size_right": None if spec.window is None else 0,
    }
