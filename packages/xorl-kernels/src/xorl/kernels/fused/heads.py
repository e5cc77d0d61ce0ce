"""RMS norm per head and rotary embedding of queries and keys, with one launch in each pass.

Plain twin: `reference.split_heads`. Computed in fp32 from the projections' output to the final rounding; the norms'
weights are first rounded to the dtype of the projections. The backward pass writes directly into the gradient of the
merged projection's output, so that nothing is concatenated. The weights' gradients are summed in fp32, within each
program and then over programs, in a fixed order.

Shapes: T tokens, H query heads, G key/value heads, C channels of a head.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from xorl.kernels.fused.arguments import HeadNorms, HeadShape, RopeTables, check_heads
from xorl.kernels.fused.device import launch, power_of_2, rows_per_program
from xorl.kernels.fused.heads_triton import backward, forward
from xorl.kernels.fused.partial import sum_of_programs
from xorl.kernels.fused.reference import split_heads as plain_split_heads

TILE = 1024  # number of heads times values in half a head: 8 per thread
NUM_WARPS = 4
# Programs of the backward pass for queries, and again for keys; enough of them to hide the latency of memory.
PROGRAMS_PER_PROCESSOR = 8


def split_heads(
    projected: tuple[Tensor, ...], shape: HeadShape, norms: HeadNorms | None, rope: RopeTables | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, C], k and v [T, G, C], as in `reference.split_heads`, with its errors. C must be even.

    v is a view of the projection. Without norms and rope, q and k are also views, and nothing is computed.
    """
    check_heads(projected, shape, norms, rope)
    if norms is None and rope is None:
        return plain_split_heads(projected, shape, None, None)
    q_weight, k_weight, eps, offset = norms or (None, None, 0.0, 0.0)
    cos, sin = rope or (None, None)
    if len(projected) == 1:
        return _FromMerged.apply(projected[0], q_weight, k_weight, cos, sin, eps, offset, *shape)
    q, k, v = (x.unflatten(-1, (-1, shape.head_dim)) for x in projected)
    q, k = _FromSeparate.apply(q, k, q_weight, k_weight, cos, sin, eps, offset)
    return q, k, v


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    has_norms: bool
    eps: float
    offset: float
    shape: tuple[int, int, int]


class _FromMerged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        eps: float,
        offset: float,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape = HeadShape(num_heads, num_kv_heads, head_dim)
        q, k, v = plain_split_heads((qkv,), shape, None, None)
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)  # pyright: ignore[reportArgumentType] None may be saved
        ctx.has_norms, ctx.eps, ctx.offset = q_weight is not None, eps, offset
        ctx.shape = num_heads, num_kv_heads, head_dim
        q, k = _qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, offset)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] the decorator has no types
        ctx: _Context, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
    ) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        grad_qkv, grad_q_weight, grad_k_weight = _qkv_norm_rope_backward(
            grad_q, grad_k, grad_v, qkv, q_weight, k_weight, cos, sin, ctx.eps, ctx.offset, *ctx.shape
        )
        weights = (grad_q_weight, grad_k_weight) if ctx.has_norms else (None, None)
        return grad_qkv, *weights, None, None, None, None, None, None, None


class _FromSeparate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        eps: float,
        offset: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)  # pyright: ignore[reportArgumentType] None may be saved
        ctx.has_norms, ctx.eps, ctx.offset = q_weight is not None, eps, offset
        return _qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, offset)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] the decorator has no types
        ctx: _Context, grad_q: Tensor, grad_k: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, q_weight, k_weight, cos, sin = ctx.saved_tensors
        out_q, out_k, grad_q_weight, grad_k_weight = _qk_norm_rope_backward(
            grad_q, grad_k, q, k, q_weight, k_weight, cos, sin, ctx.eps, ctx.offset
        )
        weights = (grad_q_weight, grad_k_weight) if ctx.has_norms else (None, None)
        return out_q, out_k, *weights, None, None, None, None


@torch.library.custom_op("xorl::qk_norm_rope", mutates_args=())
def _qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """q [T, H, C] and k [T, G, C], normalised if there are weights and rotated if there are tables."""
    q, k = _with_whole_heads(q), _with_whole_heads(k)
    q_out, k_out = _like(q), _like(k)
    if q.shape[0]:
        launch(
            forward,
            (q.shape[0],),
            *_pointers(q, k, q_weight, k_weight, cos, sin),
            q_out,
            k_out,
            q.stride(0),
            k.stride(0),
            eps,
            **_constants(q, k, q_weight, cos, offset),
            num_warps=NUM_WARPS,
        )
    return q_out, k_out


@_qk_norm_rope.register_fake
def _(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    return _like(q), _like(k)


@torch.library.custom_op("xorl::qk_norm_rope_backward", mutates_args=())
def _qk_norm_rope_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and the two weights; those of the weights are empty if there are none."""
    out_q, out_k = _like(q), _like(k)
    weights = _launch_backward(grad_q, grad_k, q, k, q_weight, k_weight, cos, sin, eps, offset, out_q, out_k)
    return out_q, out_k, *weights


@_qk_norm_rope_backward.register_fake
def _(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like_weight(q, q_weight), _like_weight(k, k_weight)


@torch.library.custom_op("xorl::qkv_norm_rope_backward", mutates_args=())
def _qkv_norm_rope_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    offset: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qkv [T, (H + 2G) * C] and the two weights; those of the weights are empty if there are none."""
    shape = HeadShape(num_heads, num_kv_heads, head_dim)
    grad_qkv = _like(qkv)
    out_q, out_k, out_v = plain_split_heads((grad_qkv,), shape, None, None)
    q, k, _ = plain_split_heads((qkv,), shape, None, None)
    weights = _launch_backward(
        grad_q,
        grad_k,
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        eps,
        offset,
        out_q,
        out_k,
        (_with_whole_heads(grad_v), out_v),
    )
    return grad_qkv, *weights


@_qkv_norm_rope_backward.register_fake
def _(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    offset: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(qkv), _like_weight(qkv, q_weight), _like_weight(qkv, k_weight)


def _launch_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    offset: float,
    out_q: Tensor,
    out_k: Tensor,
    values: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Write the gradients of q and k into `out_q` and `out_k`; returns those of the weights.

    `values` is (source, target): the same launch copies the source, which is shaped like grad_k, to the target.
    """
    q, k, grad_q, grad_k = (_with_whole_heads(x) for x in (q, k, grad_q, grad_k))
    num_tokens, _, head_dim = q.shape
    tokens = rows_per_program(num_tokens, PROGRAMS_PER_PROCESSOR)
    num_programs = math.ceil(num_tokens / tokens)
    partial = torch.empty(2, num_programs, head_dim, dtype=torch.float32, device=q.device)
    grad_v, out_v = values or (grad_k, out_k)
    if num_programs:
        launch(
            backward,
            (num_programs, 2),
            *_pointers(q, k, q_weight, k_weight, cos, sin),
            grad_q,
            grad_k,
            grad_v,
            out_q,
            out_k,
            out_v,
            partial,
            q.stride(0),
            k.stride(0),
            grad_q.stride(0),
            grad_k.stride(0),
            grad_v.stride(0),
            out_q.stride(0),
            out_k.stride(0),
            num_tokens,
            tokens,
            eps,
            **_constants(q, k, q_weight, cos, offset),
            HAS_VALUES=values is not None,
            num_warps=NUM_WARPS,
        )
    if q_weight is None or k_weight is None:
        return _like_weight(q, None), _like_weight(k, None)
    return sum_of_programs(partial[0], q_weight.dtype), sum_of_programs(partial[1], k_weight.dtype)


def _with_whole_heads(x: Tensor) -> Tensor:
    """x [T, H, C] with the heads of a token contiguous; tokens may be strided."""
    is_whole = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if is_whole else x.contiguous()


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_weight(x: Tensor, weight: Tensor | None) -> Tensor:
    return x.new_empty(0) if weight is None else torch.empty_like(weight)


def _pointers(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, ...]:
    """The kernels' inputs. q is the placeholder for missing ones, which are not read."""
    tables = (q, q) if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
    weights = (q, q) if q_weight is None or k_weight is None else (q_weight, k_weight)
    return q, k, *weights, *tables


def _constants(
    q: Tensor, k: Tensor, q_weight: Tensor | None, cos: Tensor | None, offset: float
) -> dict[str, int | float]:
    head_dim = q.shape[2]
    assert head_dim % 2 == 0, f"head_dim must be even, got {head_dim}"
    half_block = power_of_2(head_dim // 2)
    heads_at_once = max(TILE // half_block, 1)
    return {
        "NUM_HEADS": q.shape[1],
        "NUM_KV_HEADS": k.shape[1],
        "HEAD_DIM": head_dim,
        "HAS_NORM": q_weight is not None,
        "OFFSET": offset,
        "HAS_ROPE": cos is not None,
        "HALF_BLOCK": half_block,
        "Q_BLOCK": min(power_of_2(q.shape[1]), heads_at_once),
        "K_BLOCK": min(power_of_2(k.shape[1]), heads_at_once),
    }
