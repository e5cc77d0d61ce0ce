"""Attention by PyTorch's own kernels: `sdpa` document by document anywhere, `native` whole packed rows on CUDA.

Shapes: T tokens, N documents of L tokens, H query heads, G key/value heads, C channels of a head.
"""

from collections import Counter
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from xorl.kernels.attention.interface import AttentionRequest
from xorl.kernels.attention.reference import causal_mask
from xorl.kernels.layout import SequenceLayout

HALF_DTYPES = (torch.float16, torch.bfloat16)
# What FlashAttention 2, which PyTorch carries, is built for.
NATIVE_MAX_HEAD_DIM = 256
NATIVE_HEAD_DIM_MULTIPLE = 8
NATIVE_MIN_CAPABILITY = (8, 0)


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, *, scale: float, window: int | None
) -> Tensor:
    """`AttentionFn` over `scaled_dot_product_attention`, which picks its own kernel for the device and dtype.

    Documents of one length run in one call where that saves at least half of the calls: packs of short documents would
    otherwise spend their time starting kernels.
    """
    if not layout.lengths:
        return torch.empty_like(q)
    groups = Counter(layout.lengths)
    if 2 * len(groups) > len(layout.lengths):
        outputs = [
            _attend_documents(*documents, length=len(documents[0]), scale=scale, window=window)
            for documents in zip(*(x.split(list(layout.lengths)) for x in (q, k, v)), strict=True)
        ]
        return torch.cat(outputs)
    by_length, back = _order_by_length(layout.lengths, q.device)
    sizes = [count * length for length, count in groups.items()]
    grouped = (x.index_select(0, by_length).split(sizes) for x in (q, k, v))
    outputs = [
        _attend_documents(*rows, length=length, scale=scale, window=window)
        for length, rows in zip(groups, zip(*grouped, strict=True), strict=True)
    ]
    return torch.cat(outputs).index_select(0, back)


@lru_cache(maxsize=8)
def _order_by_length(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows with documents of one length next to each other, in the order in which lengths first occur; and its inverse.

    Every layer of a forward pass asks for the same one.
    """
    rows: dict[int, list[Tensor]] = {}
    for length, tokens in zip(lengths, torch.arange(sum(lengths)).split(list(lengths)), strict=True):
        rows.setdefault(length, []).append(tokens)
    order = torch.cat([tokens for same in rows.values() for tokens in same])
    return order.to(device), order.argsort().to(device)


def native_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, *, scale: float, window: int | None
) -> Tensor:
    """`AttentionFn` over `varlen_attn`: one launch for all documents; its kernel takes grouped heads as they are."""
    # The kernel counts the tokens before the query; ours counts the query too. Zero to the right is causal.
    left = -1 if window is None else window - 1
    output = varlen_attn(
        q,
        k,
        v,
        layout.cu_seqlens,
        layout.cu_seqlens,
        layout.max_seqlen,
        layout.max_seqlen,
        scale=scale,
        window_size=(left, 0),
    )
    assert isinstance(output, Tensor)
    return output


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


def _attend_documents(q: Tensor, k: Tensor, v: Tensor, *, length: int, scale: float, window: int | None) -> Tensor:
    """N documents of L = `length` tokens, [N*L, H, C] and [N*L, G, C] -> [N*L, H, C]."""
    num_heads = q.shape[1]
    mask = None if window is None or window >= length else causal_mask(length, window, q.device)
    # On CUDA only the half precision kernel without a mask takes grouped heads; others would fall to full scores.
    grouped = k.shape[1] != num_heads
    if grouped and q.is_cuda and (mask is not None or q.dtype not in HALF_DTYPES):
        k, v, grouped = _expand_heads(k, num_heads), _expand_heads(v, num_heads), False
    heads_first = [x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v)]  # [N, H or G, L, C]
    output = F.scaled_dot_product_attention(
        *heads_first, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return output.transpose(1, 2).flatten(0, 1)


def _expand_heads(x: Tensor, num_heads: int) -> Tensor:
    """[T, G, C] -> [T, H, C], each key/value head repeated for the query heads that read it."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)
