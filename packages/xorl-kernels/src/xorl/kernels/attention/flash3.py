"""`flash_attention_3`: the package flash_attn_3, for Hopper. Importing this file loads its operators.

Shapes: T tokens, H query heads, G key/value heads, C channels of a head.
"""

import flash_attn_3._C  # noqa: F401  # pyright: ignore[reportMissingImports]  (registers the operators)
import torch
from torch import Tensor

from xorl.kernels.attention.kernel import AttentionSpec, Documents, Gradients
from xorl.kernels.attention.operator import PackedAttention

# Arguments to pass as None. Versions of the library agree on the names of the arguments, but not on the defaults.
UNUSED = [
    "k_new",
    "v_new",
    "q_v",
    "out",
    "cu_seqlens_k_new",
    "seqused_q",
    "seqused_k",
    "page_table",
    "kv_batch_idx",
    "leftpad_k",
    "rotary_cos",
    "rotary_sin",
    "seqlens_rotary",
    "q_descale",
    "k_descale",
    "v_descale",
]


def flash3_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    key_documents: Documents,
    spec: AttentionSpec,
    *,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """`ForwardKernel` using FlashAttention 3 (arXiv:2407.08608)."""
    # num_splits=1 keeps the library from splitting a row's keys over thread blocks and adding the partial results.
    out, lse, *_ = torch.ops.flash_attn_3.fwd(
        q=q,
        k=k,
        v=v,
        **dict.fromkeys(UNUSED),
        **_options(documents, key_documents, spec),
        num_splits=1,
    )
    return out, lse


def flash3_backward(
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
    """`BackwardKernel` using FlashAttention 3; if `deterministic`, it sums the gradient of q in a fixed order."""
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    torch.ops.flash_attn_3.bwd(
        dout=grad_out,
        q=q,
        k=k,
        v=v,
        out=out,
        softmax_lse=lse,
        dq=grad_q,
        dk=grad_k,
        dv=grad_v,
        seqused_q=None,
        seqused_k=None,
        **_options(documents, key_documents, spec),
        deterministic=deterministic,
    )
    return grad_q, grad_k, grad_v


flash_attention_3 = PackedAttention(
    "flash_attention_3", flash3_forward, flash3_backward, caps_scores=True, reads_lengths=False
)


def _options(documents: Documents, key_documents: Documents, spec: AttentionSpec) -> dict[str, object]:
    """The library's arguments. Its window does not count the query itself."""
    return {
        "cu_seqlens_q": documents.cu_seqlens,
        "cu_seqlens_k": key_documents.cu_seqlens,
        "max_seqlen_q": documents.longest,
        "max_seqlen_k": key_documents.longest,
        "softmax_scale": spec.scale,
        "is_causal": spec.causal,
        "window_size_left": -1 if spec.window is None else spec.window - 1,
        "window_size_right": -1 if spec.window is None else 0,
        "softcap": spec.softcap or 0.0,
    }
