"""`native`: attention by the kernels PyTorch carries for CUDA, all documents of a row in one launch.

Shapes: T tokens, N documents, H query heads, G key/value heads, C channels of a head.
"""

import torch
from torch import Tensor

from xorl.kernels.attention.interface import AttentionRequest
from xorl.kernels.attention.operator import Gradients, PackedAttention, longest_document

HALF_DTYPES = (torch.float16, torch.bfloat16)
# What FlashAttention 2, which PyTorch carries, is built for.
NATIVE_MAX_HEAD_DIM = 256
NATIVE_HEAD_DIM_MULTIPLE = 8
NATIVE_MIN_CAPABILITY = (8, 0)

aten = torch.ops.aten


def native_forward(
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
    """`ForwardKernel` by FlashAttention 2, whose kernel takes grouped heads as they are."""
    longest = longest_document(offsets)
    out, lse, *_ = aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        0.0,
        window is None,
        return_debug_mask=False,
        scale=scale,
        **_window(window),
    )
    return out, lse


def native_backward(
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
    """`BackwardKernel` by FlashAttention 2; torch's own switch to deterministic algorithms reaches it."""
    longest = longest_document(offsets)
    # Where nothing is dropped, the state of the generator is not read.
    generator_state = torch.zeros((2,), dtype=torch.uint64, device=q.device)
    return aten._flash_attention_backward(
        grad_out.contiguous(),
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        0.0,
        window is None,
        generator_state,
        torch.empty(0, device=q.device),
        scale=scale,
        **_window(window),
    )


native_attention = PackedAttention("native", native_forward, native_backward)


def _window(window: int | None) -> dict[str, int]:
    """The kernel counts the tokens before the query; ours counts the query too. Zero to the right is causal."""
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


def native_refusal(request: AttentionRequest) -> str | None:
    """Why `native_attention` cannot serve a request, or None when it can."""
    if request.device_type != "cuda":
        return f"it needs a CUDA device, the model runs on {request.device_type}"
    if request.dtype not in HALF_DTYPES:
        return f"it computes in float16 or bfloat16, the model computes in {str(request.dtype).removeprefix('torch.')}"
    if request.head_dim > NATIVE_MAX_HEAD_DIM or request.head_dim % NATIVE_HEAD_DIM_MULTIPLE:
        return (
            f"it takes a head_dim that is a multiple of {NATIVE_HEAD_DIM_MULTIPLE} up to {NATIVE_MAX_HEAD_DIM}, "
            f"the model has {request.head_dim}"
        )
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    capability = torch.cuda.get_device_capability()
    if capability < NATIVE_MIN_CAPABILITY:
        return f"it needs compute capability 8.0, this device has {capability[0]}.{capability[1]}"
    return None
