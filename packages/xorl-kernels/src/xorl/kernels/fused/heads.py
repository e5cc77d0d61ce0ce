"""RMS norm per head and rotary embedding of queries and keys, with one launch in each pass.

Plain twin: `reference.split_heads`. Computed in fp32 from the projections' output to the final rounding; the norms'
weights are first rounded to the dtype of the projections. The backward pass writes directly into the gradient of the
merged projection's output, so that nothing is concatenated. The weights' gradients are summed in fp32, within each
program and then over programs, in a fixed order.

Shapes: T tokens, H query heads, G key/value heads, C channels of a head.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from xorl.kernels.fused.arguments import HeadNorms, HeadShape, RopeTables, check_heads
from xorl.kernels.fused.device import launch, power_of_2, rows_per_program
from xorl.kernels.fused.partial import sum_of_programs
from xorl.kernels.fused.reference import split_heads as plain_split_heads

TILE = 1024  # number of heads times values in half a head: 8 per thread
NUM_WARPS = 4
# Programs of the backward pass for queries, and again for keys; enough of them to hide the latency of memory.
PROGRAMS_PER_PROCESSOR = 8
TOKENS_PER_COPY = tl.constexpr(4)


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
            _forward,
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
            _backward,
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


@triton.jit
def _forward(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    q_stride: int,
    k_stride: int,
    eps: float,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    # Indexed, because type checkers do not see that the result can be unpacked.
    tables = _load_tables(cos_ptr, sin_ptr, token, True, HEAD_DIM, HAS_ROPE, HALF_BLOCK)
    cos, sin = tables[0], tables[1]
    first, second = _load_weight(q_weight_ptr, q_ptr, HEAD_DIM, HAS_NORM, OFFSET, HALF_BLOCK)
    for head in range(0, NUM_HEADS, Q_BLOCK):
        _norm_rope_heads(
            q_ptr + token * q_stride,
            q_out_ptr + token * NUM_HEADS * HEAD_DIM,
            first,
            second,
            cos,
            sin,
            head,
            eps,
            NUM_HEADS,
            HEAD_DIM,
            HAS_NORM,
            HAS_ROPE,
            HALF_BLOCK,
            Q_BLOCK,
        )
    first, second = _load_weight(k_weight_ptr, k_ptr, HEAD_DIM, HAS_NORM, OFFSET, HALF_BLOCK)
    for head in range(0, NUM_KV_HEADS, K_BLOCK):
        _norm_rope_heads(
            k_ptr + token * k_stride,
            k_out_ptr + token * NUM_KV_HEADS * HEAD_DIM,
            first,
            second,
            cos,
            sin,
            head,
            eps,
            NUM_KV_HEADS,
            HEAD_DIM,
            HAS_NORM,
            HAS_ROPE,
            HALF_BLOCK,
            K_BLOCK,
        )


@triton.jit(do_not_specialize=["num_tokens", "tokens_of_program"])
def _backward(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    grad_q_ptr: tl.tensor,
    grad_k_ptr: tl.tensor,
    grad_v_ptr: tl.tensor,
    out_q_ptr: tl.tensor,
    out_k_ptr: tl.tensor,
    out_v_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    q_stride: int,
    k_stride: int,
    grad_q_stride: int,
    grad_k_stride: int,
    grad_v_stride: int,
    out_q_stride: int,
    out_k_stride: int,
    num_tokens: int,
    tokens_of_program: int,
    eps: float,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    HAS_VALUES: tl.constexpr,
) -> None:
    """Programs with second index 0 process queries, the others keys and values: separate ones use fewer registers."""
    program = tl.program_id(0).to(tl.int64)
    start = program * tokens_of_program
    if tl.program_id(1) == 0:
        _norm_rope_tokens_backward(
            q_ptr,
            grad_q_ptr,
            out_q_ptr,
            q_weight_ptr,
            cos_ptr,
            sin_ptr,
            partial_ptr + program * HEAD_DIM,
            q_stride,
            grad_q_stride,
            out_q_stride,
            start,
            num_tokens,
            tokens_of_program,
            eps,
            NUM_HEADS,
            HEAD_DIM,
            HAS_NORM,
            OFFSET,
            HAS_ROPE,
            HALF_BLOCK,
            Q_BLOCK,
        )
    else:
        if HAS_VALUES:
            _copy_tokens(
                grad_v_ptr,
                out_v_ptr,
                grad_v_stride,
                out_k_stride,
                start,
                num_tokens,
                tokens_of_program,
                NUM_KV_HEADS * HEAD_DIM,
                2 * K_BLOCK * HALF_BLOCK,
            )
        _norm_rope_tokens_backward(
            k_ptr,
            grad_k_ptr,
            out_k_ptr,
            k_weight_ptr,
            cos_ptr,
            sin_ptr,
            partial_ptr + (tl.num_programs(0) + program) * HEAD_DIM,
            k_stride,
            grad_k_stride,
            out_k_stride,
            start,
            num_tokens,
            tokens_of_program,
            eps,
            NUM_KV_HEADS,
            HEAD_DIM,
            HAS_NORM,
            OFFSET,
            HAS_ROPE,
            HALF_BLOCK,
            K_BLOCK,
        )


@triton.jit
def _copy_tokens(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    source_stride: int,
    target_stride: int,
    start: tl.tensor,
    num_tokens: int,
    tokens_of_program: int,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy tokens from `start` on, several at once, because the compiler does not move loads ahead of stores."""
    end = tl.minimum(start + tokens_of_program, num_tokens)
    while start < end:
        tokens = start + tl.arange(0, TOKENS_PER_COPY)[:, None]
        is_token = tokens < end
        for first in range(0, WIDTH, BLOCK):
            lanes = first + tl.arange(0, BLOCK)[None, :]
            is_inside = (lanes < WIDTH) & is_token
            values = tl.load(source_ptr + tokens * source_stride + lanes, mask=is_inside)
            tl.store(target_ptr + tokens * target_stride + lanes, values, mask=is_inside)
        start += TOKENS_PER_COPY


@triton.jit
def _load_tables(
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    token: tl.tensor,
    is_token: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Cosines and sines of a token, [HALF_BLOCK] each."""
    lanes = tl.arange(0, HALF_BLOCK)
    cos = tl.zeros([HALF_BLOCK], tl.float32)
    sin = tl.zeros([HALF_BLOCK], tl.float32)
    if HAS_ROPE:
        is_inside = (lanes < HEAD_DIM // 2) & is_token
        cos = tl.load(cos_ptr + token * (HEAD_DIM // 2) + lanes, mask=is_inside, other=0.0)
        sin = tl.load(sin_ptr + token * (HEAD_DIM // 2) + lanes, mask=is_inside, other=0.0)
    return cos, sin


@triton.jit
def _load_weight(
    weight_ptr: tl.tensor,
    x_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves of a norm's weight, [HALF_BLOCK] each, rounded to the dtype of its input, plus the offset."""
    first = tl.zeros([HALF_BLOCK], tl.float32)
    second = tl.zeros([HALF_BLOCK], tl.float32)
    if HAS_NORM:
        lanes = tl.arange(0, HALF_BLOCK)
        is_lane = lanes < HEAD_DIM // 2
        dtype = x_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue] it is a pointer
        first = tl.load(weight_ptr + lanes, mask=is_lane, other=0.0).to(dtype).to(tl.float32) + OFFSET
        second = tl.load(weight_ptr + HEAD_DIM // 2 + lanes, mask=is_lane, other=0.0).to(dtype).to(tl.float32) + OFFSET
    return first, second


@triton.jit
def _norm_rope_heads(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    weight_first: tl.tensor,
    weight_second: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    first_head: int,
    eps: float,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
) -> None:
    """Normalise and rotate HEAD_BLOCK heads of a token, starting at `first_head`."""
    heads = first_head + tl.arange(0, HEAD_BLOCK)
    lanes = tl.arange(0, HALF_BLOCK)
    is_inside = (heads < NUM_HEADS)[:, None] & (lanes < HEAD_DIM // 2)[None, :]
    offsets = heads[:, None] * HEAD_DIM + lanes[None, :]
    first = tl.load(source_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(source_ptr + HEAD_DIM // 2 + offsets, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / HEAD_DIM + eps)[:, None]
        first = first * rstd * weight_first[None, :]
        second = second * rstd * weight_second[None, :]
    if HAS_ROPE:
        rotated = first * cos[None, :] - second * sin[None, :]
        second = second * cos[None, :] + first * sin[None, :]
        first = rotated
    dtype = target_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue] it is a pointer
    tl.store(target_ptr + offsets, first.to(dtype), mask=is_inside)
    tl.store(target_ptr + HEAD_DIM // 2 + offsets, second.to(dtype), mask=is_inside)


@triton.jit
def _norm_rope_tokens_backward(
    source_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    target_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    source_stride: int,
    grad_stride: int,
    target_stride: int,
    start: tl.tensor,
    num_tokens: int,
    tokens_of_program: int,
    eps: float,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
) -> None:
    """The gradient of `_norm_rope_heads` for all heads of a program's tokens, and its part of the weight's gradient."""
    # Indexed, because type checkers do not see that the result can be unpacked.
    weight = _load_weight(weight_ptr, source_ptr, HEAD_DIM, HAS_NORM, OFFSET, HALF_BLOCK)
    # Summed over heads only once, at the end, because each sum over heads synchronises the warps.
    sum_first = tl.zeros([HEAD_BLOCK, HALF_BLOCK], tl.float32)
    sum_second = tl.zeros([HEAD_BLOCK, HALF_BLOCK], tl.float32)
    NUM_BLOCKS: tl.constexpr = (NUM_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    index = 0
    while index < tokens_of_program * NUM_BLOCKS:
        token = start + index // NUM_BLOCKS
        is_token = token < num_tokens
        tables = _load_tables(cos_ptr, sin_ptr, token, is_token, HEAD_DIM, HAS_ROPE, HALF_BLOCK)
        grad_weight = _norm_rope_heads_backward(
            source_ptr + token * source_stride, grad_ptr + token * grad_stride, target_ptr + token * target_stride,
            weight[0], weight[1], tables[0], tables[1], index % NUM_BLOCKS * HEAD_BLOCK, is_token, eps,
            NUM_HEADS, HEAD_DIM, HAS_NORM, HAS_ROPE, HALF_BLOCK, HEAD_BLOCK,
        )  # fmt: skip
        sum_first += grad_weight[0]
        sum_second += grad_weight[1]
        index += 1
    if HAS_NORM:
        lanes = tl.arange(0, HALF_BLOCK)
        is_lane = lanes < HEAD_DIM // 2
        tl.store(partial_ptr + lanes, tl.sum(sum_first, axis=0), mask=is_lane)
        tl.store(partial_ptr + HEAD_DIM // 2 + lanes, tl.sum(sum_second, axis=0), mask=is_lane)


@triton.jit
def _norm_rope_heads_backward(
    source_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    target_ptr: tl.tensor,
    weight_first: tl.tensor,
    weight_second: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    first_head: int,
    is_token: tl.tensor,
    eps: float,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The gradient of `_norm_rope_heads`; returns each head's share of the gradients of both weight halves."""
    heads = first_head + tl.arange(0, HEAD_BLOCK)
    lanes = tl.arange(0, HALF_BLOCK)
    is_inside = (heads < NUM_HEADS)[:, None] & (lanes < HEAD_DIM // 2)[None, :] & is_token
    offsets = heads[:, None] * HEAD_DIM + lanes[None, :]
    grad_first = tl.load(grad_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)
    grad_second = tl.load(grad_ptr + HEAD_DIM // 2 + offsets, mask=is_inside, other=0.0).to(tl.float32)
    first = tl.zeros([HEAD_BLOCK, HALF_BLOCK], tl.float32)
    second = tl.zeros([HEAD_BLOCK, HALF_BLOCK], tl.float32)
    if HAS_NORM:
        first = tl.load(source_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)
        second = tl.load(source_ptr + HEAD_DIM // 2 + offsets, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_ROPE:
        rotated = grad_first * cos[None, :] + grad_second * sin[None, :]
        grad_second = grad_second * cos[None, :] - grad_first * sin[None, :]
        grad_first = rotated
    grad_weight_first = grad_first
    grad_weight_second = grad_second
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / HEAD_DIM + eps)[:, None]
        first *= rstd
        second *= rstd
        grad_weight_first = grad_first * first
        grad_weight_second = grad_second * second
        grad_first *= weight_first[None, :]
        grad_second *= weight_second[None, :]
        inner = tl.sum(grad_first * first + grad_second * second, axis=1)[:, None] / HEAD_DIM
        grad_first = (grad_first - first * inner) * rstd
        grad_second = (grad_second - second * inner) * rstd
    dtype = target_ptr.dtype.element_ty
    tl.store(target_ptr + offsets, grad_first.to(dtype), mask=is_inside)
    tl.store(target_ptr + HEAD_DIM // 2 + offsets, grad_second.to(dtype), mask=is_inside)
    return grad_weight_first, grad_weight_second
