"""`sdpa`: attention by the kernels of `scaled_dot_product_attention`, on any device.

Documents of the same length may share a call.

Shapes: T tokens, N documents of L tokens, H query heads, G key/value heads, C channels of a head.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from xorl.kernels.attention.cudnn import CUDNN_MAX_HEAD_DIM, cudnn_backward, cudnn_forward, no_dropout
from xorl.kernels.attention.limits import HALF_DTYPES
from xorl.kernels.attention.operator import Gradients, PackedAttention
from xorl.kernels.attention.reference import causal_mask, eager_backward, eager_forward
from xorl.kernels.attention.split import split_by_heads

FLASH_HEAD_DIM_MULTIPLE = 8
# The memory-efficient kernel reads log-sum-exps in blocks of this many tokens; the padding must be infinite.
EFFICIENT_LSE_BLOCK = 32
# The memory-efficient kernel requires a head's channels to occupy a multiple of this many bytes.
EFFICIENT_CHANNEL_BYTES = 16
# The memory-efficient kernel's mask type for causal attention in which the first query sees only the first key.
CAUSAL_FROM_TOP_LEFT = 1
# The memory-efficient kernel requires rows of the bias to begin at multiples of this many elements.
EFFICIENT_BIAS_BLOCK = 16
# The size limit for a mask that expresses a window; the mask grows with the square of the document's length.
MAX_BIAS_BYTES = 2**32

aten = torch.ops.aten


def sdpa_forward(
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
    """`ForwardKernel` using the kernel that torch chooses for the device, dtype and determinism."""
    plan = _plan(tuple(offsets.diff().tolist()), q.device)
    q, k, v = (plan.sort(x) for x in (q, k, v))
    outs, lses = [], []
    for rows, length in plan.calls:
        call = _Call.of(q[rows], k[rows], v[rows], length, scale, window)
        out, lse = KERNELS[call.kernel][0](call)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        lses.append(lse.transpose(0, 1).flatten(1, 2))
    return plan.unsort(_concatenate(outs, dim=0)), plan.unsort(_concatenate(lses, dim=1), dim=1)


def sdpa_backward(
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
    """`BackwardKernel` of `sdpa_forward`."""
    plan = _plan(tuple(offsets.diff().tolist()), q.device)
    grad_out, q, k, v, out = (plan.sort(x) for x in (grad_out, q, k, v, out))
    lse = plan.sort(lse, dim=1)
    gradients = []
    for rows, length in plan.calls:
        call = _Call.of(q[rows], k[rows], v[rows], length, scale, window)
        lse_rows = lse[:, rows].unflatten(1, (-1, length)).transpose(0, 1)  # [N, H, L]
        parts = KERNELS[call.kernel][1](
            call, _heads_first(grad_out[rows], length), _heads_first(out[rows], length), lse_rows
        )
        gradients.append(tuple(x.transpose(1, 2).flatten(0, 1) for x in call.sum_groups(parts, k.shape[1])))
    grad_q, grad_k, grad_v = (plan.unsort(_concatenate(parts, dim=0)) for parts in zip(*gradients, strict=True))
    return grad_q, grad_k, grad_v


sdpa_attention = PackedAttention("sdpa", sdpa_forward, split_by_heads(sdpa_backward))


@dataclass(frozen=True)
class _Plan:
    """How a row is split into calls: `calls` lists (rows, length of a document).

    Each document gets its own call, unless one call per length at least halves the number of calls. That matters for
    rows of many short documents, where launches take most of the time. With one call per length, `order` sorts tokens
    by the length of their document, and `inverse` restores their order.
    """

    calls: tuple[tuple[slice, int], ...]
    order: Tensor | None = None
    inverse: Tensor | None = None

    def sort(self, x: Tensor, dim: int = 0) -> Tensor:
        return x if self.order is None else x.index_select(dim, self.order)

    def unsort(self, x: Tensor, dim: int = 0) -> Tensor:
        return x if self.inverse is None else x.index_select(dim, self.inverse)


@lru_cache(maxsize=8)
def _plan(lengths: tuple[int, ...], device: torch.device) -> _Plan:
    """The plan for documents of these lengths. Cached, because all layers and both passes need the same plan."""
    groups = Counter(lengths)
    if 2 * len(groups) > len(lengths):
        return _Plan(_row_slices([(length, length) for length in lengths]))
    rows: dict[int, list[Tensor]] = {}
    for length, tokens in zip(lengths, torch.arange(sum(lengths), device="cpu").split(list(lengths)), strict=True):
        rows.setdefault(length, []).append(tokens)
    order = torch.cat([tokens for documents in rows.values() for tokens in documents])
    calls = _row_slices([(count * length, length) for length, count in groups.items()])
    return _Plan(calls, _copy_to(device, order), _copy_to(device, order.argsort()))


def _copy_to(device: torch.device, rows: Tensor) -> Tensor:
    """A copy on `device`, from pinned memory: with pageable memory the host would wait for all queued work."""
    return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows.to(device)


def _row_slices(sizes: list[tuple[int, int]]) -> tuple[tuple[slice, int], ...]:
    """Convert (number of rows, length of a document) of each call to (slice of rows, length of a document)."""
    calls, start = [], 0
    for size, length in sizes:
        calls.append((slice(start, start + size), length))
        start += size
    return tuple(calls)


@dataclass(frozen=True)
class _Call:
    """The arguments of one call for N documents of L tokens, and the kernel to use: q [N, H, L, C], k, v [N, G, L, C].

    `bias` [L, L] is added to the scores. Without one, attention is causal and limited to `window`, which is None if it
    covers whole documents.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    window: int | None
    bias: Tensor | None
    kernel: SDPBackend

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, length: int, scale: float, window: int | None) -> "_Call":
        """The call for q [N * L, H, C], k and v [N * L, G, C]."""
        num_heads = q.shape[1]
        if window is not None and window >= length:
            window = None
        # Only the memory-efficient kernel on CUDA supports windows; elsewhere a bias expresses them.
        has_window_kernel = q.is_cuda and q.shape[-1] * q.element_size() % EFFICIENT_CHANNEL_BYTES == 0
        bias = None if window is None or has_window_kernel else _bias(length, window, q)
        # On CUDA, grouped heads are supported only in half precision without a window. In other cases torch would fall
        # back to computing full scores, so repeat the key/value heads instead.
        if k.shape[1] != num_heads and q.is_cuda and (window is not None or q.dtype not in HALF_DTYPES):
            k, v = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k, v))
        q, k, v = (_heads_first(x, length) for x in (q, k, v))
        if window is not None and bias is None:
            return cls(q, k, v, scale, window, None, SDPBackend.EFFICIENT_ATTENTION)
        options = {"scale": scale, "enable_gqa": k.shape[1] != num_heads}
        kernel = SDPBackend(torch._fused_sdp_choice(q, k, v, bias, 0.0, bias is None, **options))
        wide, deterministic = q.shape[-1] > CUDNN_MAX_HEAD_DIM, torch.are_deterministic_algorithms_enabled()
        if kernel == SDPBackend.CUDNN_ATTENTION and (bias is not None or wide or deterministic):
            # torch chooses for the forward pass only, and cuDNN's backward pass does not support this call.
            kernel = SDPBackend.FLASH_ATTENTION if bias is None else SDPBackend.EFFICIENT_ATTENTION
        return cls(q, k, v, scale, window, bias, kernel)

    def sum_groups(self, gradients: Gradients, num_kv_heads: int) -> Gradients:
        """Sum the gradients of repeated key/value heads, so that they become those of the original heads."""
        grad_q, *others = gradients
        grad_k, grad_v = (
            x if x.shape[1] == num_kv_heads else x.unflatten(1, (num_kv_heads, -1)).sum(dim=2) for x in others
        )
        return grad_q, grad_k, grad_v


def _bias(length: int, window: int, like: Tensor) -> Tensor:
    num_bytes = length**2 * like.element_size()
    if num_bytes > MAX_BIAS_BYTES:
        raise ValueError(
            f"attention backend sdpa: a window of {window} tokens in a document of {length} needs a mask of "
            f"{num_bytes / 2**30:.1f} GiB on {like.device.type} with heads of {like.shape[-1]} channels; use shorter "
            "documents or, on a GPU, a flash attention backend"
        )
    visible = causal_mask(length, window, like.device)
    return torch.zeros_like(visible, dtype=like.dtype).masked_fill_(~visible, float("-inf"))


def _heads_first(x: Tensor, length: int) -> Tensor:
    """[N * L, H, C] -> [N, H, L, C]."""
    return x.unflatten(0, (-1, length)).transpose(1, 2)


def _concatenate(parts: list[Tensor] | tuple[Tensor, ...], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


# Forward kernels return the output [N, H, L, C] and log-sum-exp [N, H, L]; backward kernels take the gradient, output
# and log-sum-exp in these shapes.


def _flash_forward(call: _Call) -> tuple[Tensor, Tensor]:
    if call.q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(
            call.q, call.k, call.v, 0.0, call.bias is None, attn_mask=call.bias, scale=call.scale
        )
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        *(_pad_channels(x) for x in (call.q, call.k, call.v)), 0.0, True, scale=call.scale
    )
    return out[..., : call.q.shape[-1]], lse


def _flash_backward(call: _Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    if call.q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, call.q, call.k, call.v, out, lse, 0.0, call.bias is None, attn_mask=call.bias, scale=call.scale
        )
    grad_out, q, k, v, out = (_pad_channels(x) for x in (grad_out, call.q, call.k, call.v, out))
    length = q.shape[2]
    gradients = aten._scaled_dot_product_flash_attention_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        None,
        None,
        length,
        length,
        0.0,
        True,
        # A generator state, which is not read without dropout.
        torch.zeros((2,), dtype=torch.uint64, device=q.device),
        torch.empty(0, device=q.device),
        scale=call.scale,
    )
    return _cut_channels(gradients, call.q.shape[-1])


def _pad_channels(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % FLASH_HEAD_DIM_MULTIPLE)) if x.shape[-1] % FLASH_HEAD_DIM_MULTIPLE else x


def _cut_channels(gradients: Gradients, head_dim: int) -> Gradients:
    grad_q, grad_k, grad_v = (x[..., :head_dim] for x in gradients)
    return grad_q, grad_k, grad_v


def _efficient_forward(call: _Call) -> tuple[Tensor, Tensor]:
    if call.bias is None and call.window is not None:
        q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))  # [N, L, H, C]
        out, lse, *_ = aten._efficient_attention_forward(
            q,
            k,
            v,
            None,
            None,
            None,
            None,
            None,
            0.0,
            CAUSAL_FROM_TOP_LEFT,
            True,
            scale=call.scale,
            window_size=call.window,
        )
        return out.transpose(1, 2), lse[:, :, : call.q.shape[2]]
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        call.q, call.k, call.v, _expand_bias(call), True, 0.0, call.bias is None, scale=call.scale
    )
    return out, lse[:, :, : call.q.shape[2]]


def _efficient_backward(call: _Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    lse = F.pad(lse, (0, -lse.shape[-1] % EFFICIENT_LSE_BLOCK), value=float("inf")).contiguous()
    if call.bias is None and call.window is not None:
        grad_out, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, call.q, call.k, call.v, out))
        length = q.shape[1]
        gradients = aten._efficient_attention_backward(
            grad_out,
            q,
            k,
            v,
            None,
            out,
            None,
            None,
            length,
            length,
            lse,
            0.0,
            *no_dropout(q.device),
            CAUSAL_FROM_TOP_LEFT,
            False,
            scale=call.scale,
            window_size=call.window,
        )
        grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in gradients[:3])
        return grad_q, grad_k, grad_v
    grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_out,
        call.q,
        call.k,
        call.v,
        _expand_bias(call),
        out,
        lse,
        *no_dropout(call.q.device),
        0.0,
        [True, True, True, False],
        call.bias is None,
        scale=call.scale,
    )
    return grad_q, grad_k, grad_v


def _expand_bias(call: _Call) -> Tensor | None:
    """[N, H, L, L] with rows aligned as the kernel requires; a view, without a copy for each document and head."""
    if call.bias is None:
        return None
    num_documents, num_heads, length, _ = call.q.shape
    aligned = F.pad(call.bias, (0, -length % EFFICIENT_BIAS_BLOCK))[:, :length]
    return aligned.expand(num_documents, num_heads, length, length)


def _cudnn_forward(call: _Call) -> tuple[Tensor, Tensor]:
    return cudnn_forward(call.q, call.k, call.v, call.scale)


def _cudnn_backward(call: _Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    return cudnn_backward(grad_out, call.q, call.k, call.v, out, lse, call.scale)


def _eager_forward(call: _Call) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (call.q, call.k, call.v))
    out, lse = eager_forward(q, k, v, **_eager_options(call))
    length = call.q.shape[2]
    return _heads_first(out, length), lse.unflatten(1, (-1, length)).transpose(0, 1)


def _eager_backward(call: _Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    grad_out, q, k, v, out = (x.transpose(1, 2).flatten(0, 1) for x in (grad_out, call.q, call.k, call.v, out))
    lse = lse.transpose(0, 1).flatten(1, 2)
    gradients = eager_backward(grad_out, q, k, v, out, lse, **_eager_options(call))
    grad_q, grad_k, grad_v = (_heads_first(x, call.q.shape[2]) for x in gradients)
    return grad_q, grad_k, grad_v


def _eager_options(call: _Call) -> dict:
    num_documents, _, length, _ = call.q.shape
    offsets = torch.arange(num_documents + 1, device="cpu") * length
    return {
        "cu_seqlens": offsets,
        "offsets": offsets,
        "scale": call.scale,
        "window": call.window,
        "deterministic": False,
    }


KERNELS: Mapping[SDPBackend, tuple[Callable[[_Call], tuple[Tensor, Tensor]], Callable[..., Gradients]]] = (
    MappingProxyType(
        {
            SDPBackend.FLASH_ATTENTION: (_flash_forward, _flash_backward),
            SDPBackend.EFFICIENT_ATTENTION: (_efficient_forward, _efficient_backward),
            SDPBackend.CUDNN_ATTENTION: (_cudnn_forward, _cudnn_backward),
            SDPBackend.MATH: (_eager_forward, _eager_backward),
        }
    )
)
