"""The gradients of a chunk of the gated delta rule, given the states before it and the gradients of those after it.

A Triton kernel for the part of the backward pass that is independent for each chunk. In a chunk with the state S before
it, decays c_i from its first token to token i, updates u, queries q and keys k:

    o_i = scale * (c_i q_i^T S + sum over j <= i of c_i / c_j (q_i . k_j) u_j)
    S' = c_last S + sum over j of c_last / c_j k_j u_j^T;  u = .. - w S

Shapes: T tokens, L tokens of a chunk, M chunks, G key heads, H value heads, K and V channels of their heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xorl.kernels.fused.device import launch

CHUNK_TOKENS = 64
# Channels of keys and of values that a program has at once. More spill: there are three accumulators of them.
BLOCK = 64


def chunk_gradients(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    grad_out: Tensor,
    grad_u: Tensor,
    g: Tensor,
    states: Tensor,
    grad_states: Tensor,
    starts: Tensor,
    chunks: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q and k [T, G, K] in their dtype, of w [T, H, K] in that of q, and of g [T, H] in fp32.

    Products are of the dtype of the inputs, sums are in fp32. Each chunk is computed alone, so its gradients have the
    same bits in any row.

    Args:
        q, k: [T, G, K]; value head h uses key head h // (H / G).
        u, grad_out, grad_u: [T, H, V]; the gradient of u is whole, of the output and of the state after the chunk.
        g: [T, H] in fp32, the binary logarithms of c; its gradient is that of the natural ones.
        states, grad_states: [M, H, K, V], before each chunk, and of the state after it.
        starts: [N + 1], the first tokens of documents, followed by T.
        chunks: [M, 2], the document of each chunk, and the chunk's number in it.
    """
    (num_tokens, num_key_heads, key_dim), (_, num_heads, value_dim) = k.shape, u.shape
    by_head = [torch.empty(num_tokens, num_heads, key_dim, dtype=torch.float32, device=k.device) for _ in range(2)]
    grad_w = torch.empty(num_tokens, num_heads, key_dim, dtype=q.dtype, device=q.device)
    grad_g = torch.empty_like(g)
    launch(
        _kernel,
        (len(chunks), num_heads),
        q,
        k,
        u,
        grad_out,
        grad_u,
        g,
        states,
        grad_states,
        *by_head,
        grad_w,
        grad_g,
        starts,
        chunks,
        scale,
        num_warps=8,
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        LENGTH=CHUNK_TOKENS,
        BLOCK_K=min(BLOCK, max(16, triton.next_power_of_2(key_dim))),
        BLOCK_V=min(BLOCK, max(16, triton.next_power_of_2(value_dim))),
    )
    grad_q, grad_k = (grad.unflatten(1, (num_key_heads, -1)).sum(2).to(q.dtype) for grad in by_head)
    return grad_q, grad_k, grad_w, grad_g


@triton.jit
def _kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    u_ptr: tl.tensor,
    grad_out_ptr: tl.tensor,
    grad_u_ptr: tl.tensor,
    g_ptr: tl.tensor,
    states_ptr: tl.tensor,
    grad_states_ptr: tl.tensor,
    grad_q_ptr: tl.tensor,
    grad_k_ptr: tl.tensor,
    grad_w_ptr: tl.tensor,
    grad_g_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    scale: tl.tensor,
    num_heads: tl.constexpr,
    num_key_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key_head = head // (num_heads // num_key_heads)
    document = tl.load(chunks_ptr + 2 * chunk)
    first = tl.load(starts_ptr + document).to(tl.int64) + tl.load(chunks_ptr + 2 * chunk + 1) * LENGTH
    length = tl.minimum(tl.load(starts_ptr + document + 1) - first, LENGTH)
    token = tl.arange(0, LENGTH)
    is_real = token < length
    rows = first + token
    g = tl.load(g_ptr + rows * num_heads + head, mask=is_real, other=0.0)
    g_last = tl.load(g_ptr + (first + length - 1) * num_heads + head)
    is_earlier = (token[:, None] >= token[None, :]) & is_real[:, None] & is_real[None, :]
    # Where a token is later, the exponent may overflow.
    between = tl.exp2(tl.where(is_earlier, g[:, None] - g[None, :], float("-inf")))
    after = tl.where(is_real, tl.exp2(g_last - g), 0.0)

    value_rows = (rows * num_heads + head)[:, None] * value_dim
    scores = tl.zeros([LENGTH, LENGTH], dtype=tl.float32)
    for start_v in range(0, value_dim, BLOCK_V):
        v = start_v + tl.arange(0, BLOCK_V)
        is_in = is_real[:, None] & (v < value_dim)[None, :]
        u = tl.load(u_ptr + value_rows + v[None, :], mask=is_in, other=0.0)
        grad_out = tl.load(grad_out_ptr + value_rows + v[None, :], mask=is_in, other=0.0)
        scores += tl.dot(grad_out, tl.trans(u), input_precision="ieee")
    scores = (scores * between * scale).to(q_ptr.dtype.element_ty)

    grad_g = tl.zeros([LENGTH], dtype=tl.float32)
    kept, of_states = 0.0, 0.0
    state = (chunk * num_heads + head) * key_dim * value_dim
    for start_k in range(0, key_dim, BLOCK_K):
        c = start_k + tl.arange(0, BLOCK_K)
        is_key = c < key_dim
        from_out = tl.zeros([LENGTH, BLOCK_K], dtype=tl.float32)
        from_state = tl.zeros([LENGTH, BLOCK_K], dtype=tl.float32)
        from_u = tl.zeros([LENGTH, BLOCK_K], dtype=tl.float32)
        for start_v in range(0, value_dim, BLOCK_V):
            v = start_v + tl.arange(0, BLOCK_V)
            is_in = is_real[:, None] & (v < value_dim)[None, :]
            u = tl.load(u_ptr + value_rows + v[None, :], mask=is_in, other=0.0)
            grad_out = tl.load(grad_out_ptr + value_rows + v[None, :], mask=is_in, other=0.0)
            grad_u = tl.load(grad_u_ptr + value_rows + v[None, :], mask=is_in, other=0.0)
            place = state + c[:, None] * value_dim + v[None, :]
            is_state = is_key[:, None] & (v < value_dim)[None, :]
            before = tl.load(states_ptr + place, mask=is_state, other=0.0)
            grad_after = tl.load(grad_states_ptr + place, mask=is_state, other=0.0)
            from_out += tl.dot(grad_out, tl.trans(before), input_precision="ieee")
            from_state += tl.dot(u, tl.trans(grad_after), input_precision="ieee")
            from_u += tl.dot(grad_u, tl.trans(before), input_precision="ieee")
            of_states += tl.sum(before.to(tl.float32) * grad_after.to(tl.float32))
        is_in = is_real[:, None] & is_key[None, :]
        key_place = (rows * num_key_heads + key_head)[:, None] * key_dim + c[None, :]
        q = tl.load(q_ptr + key_place, mask=is_in, other=0.0)
        k = tl.load(k_ptr + key_place, mask=is_in, other=0.0)
        grad_q = from_out * (scale * tl.exp2(g))[:, None] + tl.dot(scores, k, input_precision="ieee")
        from_state = from_state * after[:, None]
        kept += tl.sum(k.to(tl.float32) * from_state)
        grad_k = from_state + tl.dot(tl.trans(scores), q, input_precision="ieee")
        grad_g += tl.sum(q.to(tl.float32) * grad_q, 1) - tl.sum(k.to(tl.float32) * grad_k, 1)
        place = (rows * num_heads + head)[:, None] * key_dim + c[None, :]
        tl.store(grad_q_ptr + place, grad_q, mask=is_in)
        tl.store(grad_k_ptr + place, grad_k, mask=is_in)
        tl.store(grad_w_ptr + place, (-from_u).to(grad_w_ptr.dtype.element_ty), mask=is_in)
    grad_g += tl.where(token == length - 1, of_states * tl.exp2(g_last) + kept, 0.0)
    tl.store(grad_g_ptr + rows * num_heads + head, grad_g, mask=is_real)
