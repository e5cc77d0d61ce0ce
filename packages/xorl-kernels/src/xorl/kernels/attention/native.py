"""`native`: attention by PyTorch's own CUDA kernels, with one launch for all documents of a row.

On Hopper, cuDNN is 1.5 times as fast as FlashAttention 2; it is used for rows of long documents that all have the same
length. FlashAttention 2 handles all other rows.

Shapes: T tokens, N documents of L tokens, H query heads, G key/value heads, C channels of a head.
"""

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from xorl.kernels.attention.cudnn import CUDNN_MAX_HEAD_DIM, cudnn_backward, cudnn_forward
from xorl.kernels.attention.interface import AttentionRequest
from xorl.kernels.attention.kernel import AttentionSpec, Documents, Gradients
from xorl.kernels.attention.limits import AMPERE, HOPPER, flash_refusal, uncapped_refusal
from xorl.kernels.attention.operator import PackedAttention
from xorl.kernels.attention.split import split_by_heads
from xorl.kernels.torch_private import flash_attention_backward, flash_attention_forward

# cuDNN spends tens of milliseconds planning each new length. That pays off only for lengths that recur, such as those
# of documents that fill a whole row.
CUDNN_MIN_LENGTH = 2048
CUDNN_LENGTH_MULTIPLE = 128


def native_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    key_documents: Documents,
    spec: AttentionSpec,
    *,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """`ForwardKernel` using cuDNN or FlashAttention 2, which both support grouped heads."""
    length = _cudnn_length(q, k, v, documents, spec, deterministic)
    if length is not None:
        q, k, v = (_heads_first(x, length) for x in (q, k, v))
        out, lse = cudnn_forward(q, k, v, spec)
        return out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1, 2)
    options = {"return_debug_mask": False, "scale": spec.scale, **_window(spec)}
    out, lse, *_ = flash_attention_forward(
        q, k, v, *_lengths(documents, key_documents), 0.0, spec.causal and spec.window is None, **options
    )
    return out, lse


def native_backward(
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
    """`BackwardKernel`. In deterministic mode cuDNN is not used; FlashAttention 2 reads torch's setting itself."""
    length = _cudnn_length(q, k, v, documents, spec, deterministic)
    if length is not None:
        grad_out, q, k, v, out = (_heads_first(x, length) for x in (grad_out, q, k, v, out))
        lse = lse.unflatten(1, (-1, length)).transpose(0, 1)  # [N, H, L]
        gradients = cudnn_backward(grad_out, q, k, v, out, lse, spec)
        grad_q, grad_k, grad_v = (x.transpose(1, 2).flatten(0, 1) for x in gradients)
        return grad_q, grad_k, grad_v
    # The operator requires a generator state, but does not read it without dropout.
    generator = torch.zeros((2,), dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    return flash_attention_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse,
        *_lengths(documents, key_documents),
        0.0,
        spec.causal and spec.window is None,
        *generator,
        scale=spec.scale,
        **_window(spec),
    )


native_attention = PackedAttention("native", native_forward, split_by_heads(native_backward))


def native_refusal(request: AttentionRequest) -> str | None:
    """The reason why `native_attention` cannot serve a request, or None if it can."""
    return uncapped_refusal(request) or flash_refusal(request, AMPERE)


def _window(spec: AttentionSpec) -> dict[str, int]:
    """The kernel's window does not count the query itself; a right window of 0 makes attention causal."""
    left = -1 if spec.window is None else spec.window - 1
    return {"window_size_left": left, "window_size_right": 0 if spec.causal else -1}


def _lengths(documents: Documents, key_documents: Documents) -> tuple[Tensor, Tensor, int, int]:
    return documents.cu_seqlens, key_documents.cu_seqlens, documents.longest, key_documents.longest


def _cudnn_length(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, spec: AttentionSpec, deterministic: bool
) -> int | None:
    """L if the row consists of N documents of L tokens each and cuDNN should compute it, else None.

    Both passes get the same answer.
    """
    length = documents.longest
    has_one_length = length * (len(documents.offsets) - 1) == len(q) == len(k)
    if not has_one_length or length < CUDNN_MIN_LENGTH or length % CUDNN_LENGTH_MULTIPLE:
        return None
    if deterministic or q.shape[2] > CUDNN_MAX_HEAD_DIM or (spec.window is not None and spec.window < length):
        return None
    if torch.cuda.get_device_capability(q.device)[0] < HOPPER:
        return None
    query, key, value = (_heads_first(x, length) for x in (q, k, v))
    params = SDPAParams(query, key, value, None, 0.0, spec.causal, q.shape[1] != k.shape[1])
    return length if can_use_cudnn_attention(params) else None


def _heads_first(x: Tensor, length: int) -> Tensor:
    """[N * L, H, C] -> [N, H, L, C]."""
    return x.unflatten(0, (-1, length)).transpose(1, 2)
