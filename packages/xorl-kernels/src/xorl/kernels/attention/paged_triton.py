"""Paged attention as a Triton kernel: one query per sequence; keys and values are read from their cache blocks.

Imported only if Triton is installed. `cached.py` has the contract; `plain_cached_attention` is the plain twin. Several
programs split the keys of a sequence, so that a few sequences are enough to fill a GPU. Their partial results are
combined by their log-sum-exps (Flash-Decoding, Dao et al., 2023).

Shapes: S sequences, W blocks of the longest table, B tokens of a block, E blocks of the cache, H query heads, G
key/value heads, C channels of a head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xorl.kernels.fused.device import NUM_PROCESSORS, launch, power_of_2

# Keys that a program reads at once.
BLOCK_KEYS = 64
# The smallest dimension of a matrix product. Channels and the query heads of a key head are padded to at least this.
MIN_DOT_SIZE = 16
MAX_PARTS = 32
PROGRAMS_PER_PROCESSOR = 8


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    block_size: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
    block_keys: int = BLOCK_KEYS,
) -> Tensor:
    """Attention [S, H, C] of the last token of each sequence over all tokens of the sequence.

    The launches do not depend on the values in `tables` and `lengths`, so a pass can be captured as a CUDA graph.

    Args:
        q: [S, H, C], contiguous.
        keys, values: [E * B, G, C], contiguous.
        tables: [W, S] int64; column s lists the blocks of sequence s.
        lengths: [S] int64, number of tokens of each sequence, at least 1.
        block_size: B.
        scale: multiplies the scores.
        window: number of tokens that a token sees, including itself; None for all.
        sinks: [H], a score of each head that has no value; None: there are none.
        block_keys: keys that a program reads at once.
    """
    num_sequences, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    num_splits = -(-PROGRAMS_PER_PROCESSOR * NUM_PROCESSORS // (num_sequences * num_kv_heads))
    num_parts = min(power_of_2(num_splits), MAX_PARTS)
    out = torch.empty_like(q)
    parts = out if num_parts == 1 else q.new_empty(num_parts, *q.shape, dtype=torch.float32)
    lses = q.new_empty(num_parts, num_sequences, num_heads, dtype=torch.float32)
    block_channels = max(power_of_2(head_dim), MIN_DOT_SIZE)
    launch(
        _attend,
        (num_sequences, num_kv_heads, num_parts),
        q,
        keys,
        values,
        tables,
        lengths,
        lengths if sinks is None else sinks.contiguous(),
        parts,
        lses,
        tables.stride(0),
        tables.stride(1),
        num_sequences,
        num_kv_heads,
        scale,
        0 if window is None else window,
        NUM_PARTS=num_parts,
        HAS_WINDOW=window is not None,
        HAS_SINKS=sinks is not None,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_HEADS=max(power_of_2(group), MIN_DOT_SIZE),
        BLOCK_CHANNELS=block_channels,
        BLOCK_KEYS=block_keys,
        num_warps=4,
    )
    if num_parts > 1:
        launch(
            _combine_parts,
            (num_sequences * num_heads,),
            parts,
            lses,
            out,
            num_sequences * num_heads,
            NUM_PARTS=num_parts,
            HEAD_DIM=head_dim,
            BLOCK_CHANNELS=block_channels,
            num_warps=4,
        )
    return out


@triton.jit(do_not_specialize=["window"])
def _attend(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    lengths: tl.tensor,
    sinks: tl.tensor,
    parts: tl.tensor,
    lses: tl.tensor,
    row_stride: tl.int64,  # pyright: ignore[reportInvalidTypeForm]
    sequence_stride: tl.int64,  # pyright: ignore[reportInvalidTypeForm]
    num_sequences: int,
    num_kv_heads: int,
    scale: float,
    window: int,
    NUM_PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
) -> None:
    """Each program computes the query heads of one key head of one sequence, over one part of its keys."""
    sequence, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    first = length * 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    num_steps = tl.cdiv(length - first, BLOCK_KEYS)
    steps_per_part = tl.cdiv(num_steps, NUM_PARTS)
    start = first + part * steps_per_part * BLOCK_KEYS
    stop = tl.minimum(start + steps_per_part * BLOCK_KEYS, length)
    heads = tl.arange(0, BLOCK_HEADS)
    channels = tl.arange(0, BLOCK_CHANNELS)
    # Row indices of the queries and results, viewed as [S * H, C].
    row = (sequence * num_kv_heads + kv_head) * GROUP + heads
    q_offsets = row[:, None] * HEAD_DIM + channels[None, :]
    is_query = (heads[:, None] < GROUP) & (channels[None, :] < HEAD_DIM)
    query = tl.load(q + q_offsets, mask=is_query, other=0.0)
    table = tables + sequence * sequence_stride
    running_max = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    sum_exp = tl.zeros((BLOCK_HEADS,), tl.float32)
    weighted_values = tl.zeros((BLOCK_HEADS, BLOCK_CHANNELS), tl.float32)
    if HAS_SINKS:  # noqa: SIM102 - known when the kernel is compiled
        if part == 0:
            running_max = tl.load(sinks + kv_head * GROUP + heads, mask=heads < GROUP, other=0.0).to(tl.float32)
            sum_exp += 1.0
    while start < stop:
        positions = start + tl.arange(0, BLOCK_KEYS)
        is_key = positions < stop
        blocks = tl.load(table + positions // BLOCK_SIZE * row_stride, mask=is_key, other=0)
        rows = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        offsets = ((rows * num_kv_heads + kv_head) * HEAD_DIM)[:, None] + channels[None, :]
        is_read = is_key[:, None] & (channels[None, :] < HEAD_DIM)
        key = tl.load(keys + offsets, mask=is_read, other=0.0)
        value = tl.load(values + offsets, mask=is_read, other=0.0)
        scores = tl.where(is_key[None, :], tl.dot(query, key.T) * scale, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        rescale = tl.exp(running_max - new_max)
        weights = tl.exp(scores - new_max[:, None])
        sum_exp = sum_exp * rescale + tl.sum(weights, axis=1)
        weighted_values = weighted_values * rescale[:, None] + tl.dot(weights.to(value.dtype), value)
        running_max = new_max
        start += BLOCK_KEYS
    # For a part without keys, `sum_exp` is zero, and so is the weight that `_combine_parts` gives it.
    weighted_values = weighted_values / tl.where(sum_exp > 0, sum_exp, 1.0)[:, None]
    offset = part.to(tl.int64) * num_sequences * num_kv_heads * GROUP
    tl.store(parts + offset * HEAD_DIM + q_offsets, weighted_values.to(parts.dtype.element_ty), mask=is_query)  # pyright: ignore[reportAttributeAccessIssue]
    tl.store(lses + offset + row, running_max + tl.log(sum_exp), mask=heads < GROUP)


@triton.jit
def _combine_parts(
    parts: tl.tensor,
    lses: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    NUM_PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
) -> None:
    """Average the parts of one query head, weighted by the exponentials of their log-sum-exps."""
    row = tl.program_id(0)
    part_indices, channels = tl.arange(0, NUM_PARTS), tl.arange(0, BLOCK_CHANNELS)
    offsets = part_indices.to(tl.int64) * num_rows + row
    part_lses = tl.load(lses + offsets)
    weights = tl.exp(part_lses - tl.max(part_lses, axis=0))
    is_channel = channels < HEAD_DIM
    part_ptrs = parts + offsets[:, None] * HEAD_DIM + channels[None, :]
    part_outputs = tl.load(part_ptrs, mask=is_channel[None, :], other=0.0)
    mean = tl.sum(part_outputs * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(out + row * HEAD_DIM + channels, mean.to(out.dtype.element_ty), mask=is_channel)  # pyright: ignore[reportAttributeAccessIssue]
