"""The Triton kernels of `heads`: RMS norm per head and rotary embedding of queries and keys, and their gradients.

Shapes: T tokens, H query heads, G key/value heads, C channels of a head.
"""

import triton
import triton.language as tl

TOKENS_PER_COPY = tl.constexpr(4)


@triton.jit
def forward(
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
    """Normalise and rotate the queries and keys of one token."""
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
def backward(
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
