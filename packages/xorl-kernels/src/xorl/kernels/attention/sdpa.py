"""`sdpa`: attention by the kernels of `scaled_dot_product_attention`, on any device.

Documents of the same length may share a call.

Shapes: T tokens, N documents of L queries and M keys (usually L = M), H query heads, G key/value heads, C channels of
a head.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from xorl.kernels.attention.cudnn import CUDNN_MAX_HEAD_DIM, cudnn_backward, cudnn_forward, no_dropout
from xorl.kernels.attention.kernel import AttentionSpec, Documents, Gradients
from xorl.kernels.attention.limits import HALF_DTYPES
from xorl.kernels.attention.operator import PackedAttention
from xorl.kernels.attention.reference import causal_mask, eager_backward, eager_forward
from xorl.kernels.attention.split import split_by_heads
from xorl.kernels.copies import copy_to
from xorl.kernels.torch_private import (
    efficient_attention_backward,
    efficient_attention_forward,
    fused_sdp_choice,
    scaled_dot_product_efficient_attention,
    scaled_dot_product_efficient_attention_backward,
    scaled_dot_product_flash_attention,
    scaled_dot_product_flash_attention_backward,
    scaled_dot_product_flash_attention_for_cpu,
    scaled_dot_product_flash_attention_for_cpu_backward,
)

FLASH_HEAD_DIM_MULTIPLE = 8
# The memory-efficient kernel reads log-sum-exps in blocks of this many tokens; the padding must be infinite.
EFFICIENT_LSE_BLOCK = 32
# The memory-efficient kernel requires a head's channels to occupy a multiple of this many bytes.
EFFICIENT_CHANNEL_BYTES = 16
# The memory-efficient kernel's mask type for causal attention in which the last query sees all keys.
CAUSAL_FROM_BOTTOM_RIGHT = 2
# The memory-efficient kernel requires rows of the bias to begin at multiples of this many elements.
EFFICIENT_BIAS_BLOCK = 16
# The size limit for a mask that expresses a window; the mask grows with the square of the document's length.
MAX_BIAS_BYTES = 2**32


def sdpa_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    key_documents: Documents,
    spec: AttentionSpec,
    *,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """`ForwardKernel` using the kernel that torch chooses for the device, dtype and determinism."""
    plan = _plan_of(documents, key_documents, q.device)
    q, k, v = (plan.sort(x) for x in (q, k, v))
    outs, lses = [], []
    for rows, keys, lengths in plan.calls:
        call = _Call.of(q[rows], k[keys], v[keys], lengths, spec)
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
    documents: Documents,
    key_documents: Documents,
    spec: AttentionSpec,
    *,
    deterministic: bool,
) -> Gradients:
    """`BackwardKernel` of `sdpa_forward`."""
    plan = _plan_of(documents, key_documents, q.device)
    grad_out, q, k, v, out = (plan.sort(x) for x in (grad_out, q, k, v, out))
    lse = plan.sort(lse, dim=1)
    gradients = []
    for rows, keys, lengths in plan.calls:
        call = _Call.of(q[rows], k[keys], v[keys], lengths, spec)
        lse_rows = lse[:, rows].unflatten(1, (-1, lengths[0])).transpose(0, 1)  # [N, H, L]
        parts = KERNELS[call.kernel][1](
            call, _heads_first(grad_out[rows], lengths[0]), _heads_first(out[rows], lengths[0]), lse_rows
        )
        gradients.append(tuple(x.transpose(1, 2).flatten(0, 1) for x in call.sum_groups(parts, k.shape[1])))
    grad_q, grad_k, grad_v = (plan.unsort(_concatenate(parts, dim=0)) for parts in zip(*gradients, strict=True))
    return grad_q, grad_k, grad_v


sdpa_attention = PackedAttention("sdpa", sdpa_forward, split_by_heads(sdpa_backward))


@dataclass(frozen=True)
class _Plan:
    """How a row is split into calls: `calls` lists (rows of q, rows of k and v, (L, M)).

    Each document gets its own call, unless one call per length at least halves the number of calls. That matters for
    rows of many short documents, where launches take most of the time. With one call per length, `order` sorts tokens
    by the length of their document, and `inverse` restores their order.
    """

    calls: tuple[tuple[slice, slice, tuple[int, int]], ...]
    order: Tensor | None = None
    inverse: Tensor | None = None

    def sort(self, x: Tensor, dim: int = 0) -> Tensor:
        return x if self.order is None else x.index_select(dim, self.order)

    def unsort(self, x: Tensor, dim: int = 0) -> Tensor:
        return x if self.inverse is None else x.index_select(dim, self.inverse)


def _plan_of(documents: Documents, key_documents: Documents, device: torch.device) -> _Plan:
    lengths = tuple(documents.offsets.diff().tolist())
    if key_documents is documents:
        return _plan(lengths, device)
    key_lengths = tuple(key_documents.offsets.diff().tolist())
    if key_lengths == lengths:
        return _plan(lengths, device)
    calls = zip(_slices(lengths), _slices(key_lengths), zip(lengths, key_lengths, strict=True), strict=True)
    return _Plan(tuple(calls))


@lru_cache(maxsize=8)
def _plan(lengths: tuple[int, ...], device: torch.device) -> _Plan:
    """The plan for documents of these lengths. Cached, because all layers and both passes need the same plan."""
    groups = Counter(lengths)
    if 2 * len(groups) > len(lengths):
        return _Plan(tuple((rows, rows, (rows.stop - rows.start,) * 2) for rows in _slices(lengths)))
    rows: dict[int, list[Tensor]] = {}
    for length, tokens in zip(lengths, torch.arange(sum(lengths), device="cpu").split(list(lengths)), strict=True):
        rows.setdefault(length, []).append(tokens)
    order = torch.cat([tokens for documents in rows.values() for tokens in documents])
    slices = _slices([count * length for length, count in groups.items()])
    calls = tuple((rows, rows, (length, length)) for rows, length in zip(slices, groups, strict=True))
    return _Plan(calls, copy_to(device, order), copy_to(device, order.argsort()))


def _slices(sizes: Iterable[int]) -> list[slice]:
    """Adjacent slices of these sizes, from 0 on."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


@dataclass(frozen=True)
class _Call:
    """The arguments of one call for N documents, and the kernel to use: q [N, H, L, C], k and v [N, G, M, C].

    The queries are the last L of M tokens. `bias` [L, M] is added to the scores. Without one, attention is as `spec`
    says, whose window is None if it covers whole documents.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    bias: Tensor | None
    kernel: SDPBackend

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, int], spec: AttentionSpec) -> "_Call":
        """The call for q [N * L, H, C], k and v [N * M, G, C]; `lengths` is (L, M)."""
        num_heads = q.shape[1]
        length, num_keys = lengths
        window = spec.window if spec.window is None or spec.window < num_keys else None
        spec = spec._replace(window=window)
        is_plain = window is None and (length == num_keys or not spec.causal)
        # Only the memory-efficient kernel on CUDA supports other masks, though not a window over more keys than queries
        # (wrong results on an H100 with torch 2.11). A bias expresses the rest.
        has_mask_kernel = q.is_cuda and q.shape[-1] * q.element_size() % EFFICIENT_CHANNEL_BYTES == 0
        has_mask_kernel &= window is None or length == num_keys
        bias = None if is_plain or has_mask_kernel else _bias(length, num_keys, window, q)
        # On CUDA, grouped heads are supported only in half precision for plain masks. In other cases torch would fall
        # back to computing full scores, so repeat the key/value heads instead.
        if k.shape[1] != num_heads and q.is_cuda and (not is_plain or q.dtype not in HALF_DTYPES):
            k, v = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k, v))
        q, k, v = _heads_first(q, length), _heads_first(k, num_keys), _heads_first(v, num_keys)
        if not is_plain and bias is None:
            return cls(q, k, v, spec, None, SDPBackend.EFFICIENT_ATTENTION)
        options = {"scale": spec.scale, "enable_gqa": k.shape[1] != num_heads}
        kernel = SDPBackend(fused_sdp_choice(q, k, v, bias, 0.0, bias is None and spec.causal, **options))
        wide, deterministic = q.shape[-1] > CUDNN_MAX_HEAD_DIM, torch.are_deterministic_algorithms_enabled()
        if kernel == SDPBackend.CUDNN_ATTENTION and (bias is not None or wide or deterministic):
            # torch chooses for the forward pass only, and cuDNN's backward pass does not support this call.
            kernel = SDPBackend.FLASH_ATTENTION if bias is None else SDPBackend.EFFICIENT_ATTENTION
        return cls(q, k, v, spec, bias, kernel)

    @property
    def is_causal(self) -> bool:
        """Whether the kernels mask later tokens."""
        return self.bias is None and self.spec.causal

    @property
    def needs_mask(self) -> bool:
        """Whether the memory-efficient kernel is told the mask: torch's causal one does not suffice."""
        return self.is_causal and (self.spec.window is not None or self.q.shape[2] != self.k.shape[2])

    def sum_groups(self, gradients: Gradients, num_kv_heads: int) -> Gradients:
        """Sum the gradients of repeated key/value heads, so that they become those of the original heads."""
        grad_q, *others = gradients
        grad_k, grad_v = (
            x if x.shape[1] == num_kv_heads else x.unflatten(1, (num_kv_heads, -1)).sum(dim=2) for x in others
        )
        return grad_q, grad_k, grad_v


def _bias(length: int, num_keys: int, window: int | None, like: Tensor) -> Tensor:
    num_bytes = length * num_keys * like.element_size()
    if num_bytes > MAX_BIAS_BYTES:
        reason = (
            "a document of which ranks share" if window is None else f"a window of {window} tokens in a document of"
        )
        raise ValueError(
            f"attention backend sdpa: {reason} {num_keys} tokens needs a mask of {num_bytes / 2**30:.1f} GiB on "
            f"{like.device.type} with heads of {like.shape[-1]} channels; use shorter documents or, on a GPU, a flash "
            "attention backend"
        )
    visible = causal_mask(length, num_keys, window, like.device)
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
        return scaled_dot_product_flash_attention_for_cpu(
            call.q, call.k, call.v, 0.0, call.is_causal, attn_mask=call.bias, scale=call.spec.scale
        )
    out, lse, *_ = scaled_dot_product_flash_attention(
        *(_pad_channels(x) for x in (call.q, call.k, call.v)), 0.0, call.is_causal, scale=call.spec.scale
    )
    return out[..., : call.q.shape[-1]], lse


def _flash_backward(call: _Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    if call.q.device.type == "cpu":
        return scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, call.q, call.k, call.v, out, lse, 0.0, call.is_causal, attn_mask=call.bias, scale=call.spec.scale
        )
    grad_out, q, k, v, out = (_pad_channels(x) for x in (grad_out, call.q, call.k, call.v, out))
    length = q.shape[2]
    gradients = scaled_dot_product_flash_attention_backward(
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
        call.is_causal,
        # A generator state, which is not read without dropout.
        torch.zeros((2,), dtype=torch.uint64, device=q.device),
        torch.empty(0, device=q.device),
        scale=call.spec.scale,
    )
    return _cut_channels(gradients, call.q.shape[-1])


def _pad_channels(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % FLASH_HEAD_DIM_MULTIPLE)) if x.shape[-1] % FLASH_HEAD_DIM_MULTIPLE else x


def _cut_channels(gradients: Gradients, head_dim: int) -> Gradients:
    grad_q, grad_k, grad_v = (x[..., :head_dim] for x in gradients)
    return grad_q, grad_k, grad_v


def _efficient_forward(call: _Call) -> tuple[Tensor, Tensor]:
    if call.needs_mask:
        q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))  # [N, L, H, C]
        out, lse, *_ = efficient_attention_forward(
            q,
            k,
            v,
            None,
            None,
            None,
            None,
            None,
            0.0,
            CAUSAL_FROM_BOTTOM_RIGHT,
            True,
            scale=call.spec.scale,
            window_size=call.spec.window,
        )
        return out.transpose(1, 2), lse[:, :, : call.q.shape[2]]
    out, lse, *_ = scaled_dot_product_efficient_attention(
        call.q, call.k, call.v, _expand_bias(call), True, 0.0, call.is_causal, scale=call.spec.scale
    )
    return out, lse[:, :, : call.q.shape[2]]


def _efficient_backward(call: _Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    lse = F.pad(lse, (0, -lse.shape[-1] % EFFICIENT_LSE_BLOCK), value=float("inf")).contiguous()
    if call.needs_mask:
        grad_out, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, call.q, call.k, call.v, out))
        gradients = efficient_attention_backward(
            grad_out,
            q,
            k,
            v,
            None,
            out,
            None,
            None,
            q.shape[1],
            k.shape[1],
            lse,
            0.0,
            *no_dropout(q.device),
            CAUSAL_FROM_BOTTOM_RIGHT,
            False,
            scale=call.spec.scale,
            window_size=call.spec.window,
        )
        grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in gradients[:3])
        return grad_q, grad_k, grad_v
    grad_q, grad_k, grad_v, _ = scaled_dot_product_efficient_attention_backward(
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
        call.is_causal,
        scale=call.spec.scale,
    )
    return grad_q, grad_k, grad_v


def _expand_bias(call: _Call) -> Tensor | None:
    """[N, H, L, M] with rows aligned as the kernel requires; a view, without a copy for each document and head."""
    if call.bias is None:
        return None
    length, num_keys = call.bias.shape
    aligned = F.pad(call.bias, (0, -num_keys % EFFICIENT_BIAS_BLOCK))[:, :num_keys]
    return aligned.expand(*call.q.shape[:2], length, num_keys)


def _cudnn_forward(call: _Call) -> tuple[Tensor, Tensor]:
    return cudnn_forward(call.q, call.k, call.v, call.spec)


def _cudnn_backward(call: _Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    return cudnn_backward(grad_out, call.q, call.k, call.v, out, lse, call.spec)


def _eager_forward(call: _Call) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (call.q, call.k, call.v))
    out, lse = eager_forward(q, k, v, **_eager_options(call))
    length = call.q.shape[2]
    return _heads_first(out, length), lse.unflatten(1, (-1, length)).transpose(0, 1)


def _eager_backward(call: _Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    grad_out, q, k, v, out = (x.transpose(1, 2).flatten(0, 1) for x in (grad_out, call.q, call.k, call.v, out))
    lse = lse.transpose(0, 1).flatten(1, 2)
    gradients = eager_backward(grad_out, q, k, v, out, lse, **_eager_options(call))
    grad_q, grad_k, grad_v = (
        _heads_first(x, like.shape[2]) for x, like in zip(gradients, (call.q, call.k, call.v), strict=True)
    )
    return grad_q, grad_k, grad_v


def _eager_options(call: _Call) -> dict:
    counts = torch.arange(len(call.q) + 1, device="cpu")
    documents, key_documents = (Documents(ends, ends) for ends in (counts * call.q.shape[2], counts * call.k.shape[2]))
    return {
        "documents": documents,
        "key_documents": key_documents,
        "spec": call.spec,
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
