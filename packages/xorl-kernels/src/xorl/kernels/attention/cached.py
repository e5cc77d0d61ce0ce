"""Attention of new tokens over a block-wise KV cache, for generation. It has no gradients.

The caller assigns blocks to sequences; the functions here write and read them. Layers with a recurrence have states in
the cache instead, one for each slot that the caller assigns; `xorl.kernels.recurrent.cached` writes and reads those.

Shapes: T new tokens of S sequences, M tokens of the longest sequence, E blocks of B tokens, H query heads, G key/value
heads, C channels of a head.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from xorl.kernels.arguments import as_integers, check_at_least, check_floating, check_type
from xorl.kernels.attention.interface import AttentionRequest
from xorl.kernels.attention.kernel import AttentionSpec
from xorl.kernels.attention.limits import AMPERE, flash_refusal, uncapped_refusal
from xorl.kernels.attention.native import native_refusal
from xorl.kernels.attention.operator import check_inputs, cut, padded
from xorl.kernels.attention.sinks import add_sinks
from xorl.kernels.fused.device import triton_refusal
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.torch_private import flash_attention_forward


class KeyValueCache:
    """Keys and values of all layers; block e occupies the rows [e * B, (e + 1) * B).

    Args:
        layers: (G, C) of each layer; None: it has states instead, or nothing.
        states: by layer, the shapes of the states of one sequence.
        num_slots: the number of sequences that may have states.

    Attributes:
        keys, values: [E * B, G, C], of each layer; empty without keys and values.
        states: by layer, [num_slots, ...] each, in fp32 (fp64 for a dtype of fp64).

    Raises ValueError for sizes below 1, and a dtype that is not of floating point.
    """

    def __init__(
        self,
        *,
        layers: Sequence[tuple[int, int] | None],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: Mapping[int, Sequence[tuple[int, ...]]] = MappingProxyType({}),
        num_slots: int = 0,
    ) -> None:
        check_at_least("number of layers", len(layers), 1)
        for name, size in {"block_size": block_size, "num_blocks": num_blocks}.items():
            check_at_least(name, size, 1)
        for num_kv_heads, head_dim in filter(None, layers):
            check_at_least("layers: num_kv_heads", num_kv_heads, 1)
            check_at_least("layers: head_dim", head_dim, 1)
        check_floating("dtype", dtype)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.keys, self.values = (
            [
                torch.empty(
                    (0 if shape is None else num_blocks * block_size, *(shape or ())), dtype=dtype, device=device
                )
                for shape in layers
            ]
            for _ in range(2)
        )
        wide = torch.promote_types(dtype, torch.float32)
        self.states = {
            layer: [torch.zeros((num_slots, *shape), dtype=wide, device=device) for shape in shapes]
            for layer, shapes in states.items()
        }


class CachedLayout(SequenceLayout):
    """New tokens of several sequences, concatenated into one row; each attends to its own sequence up to itself.

    Keys and values of earlier tokens are in a cache; those of the new tokens are written to the cache before any reads.

    Attributes:
        cache: the keys and values.
        new_rows: [T] int64, the cache rows of the new tokens.
        slots: [S] int64, where the states of each sequence are; None: it has none.
    """

    cache: KeyValueCache
    new_rows: Tensor
    slots: Tensor | None = None
    layer: int = 0

    def of_layer(self, index: int) -> Self:
        """A copy of this layout for the keys and values of one layer."""
        layout = copy.copy(self)
        layout.layer = index
        return layout

    def write(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' k and v, [T, G, C], in the cache; returns all rows of the cache, [E * B, G, C] each."""
        keys, values = self.cache.keys[self.layer], self.cache.values[self.layer]
        keys[self.new_rows] = k
        values[self.new_rows] = v
        return keys, values

    def states_before(self, place: int) -> Tensor:
        """The layer's states [S, ...] before the new tokens; zeros where the first token of a sequence is new."""
        assert self.slots is not None, "a model with recurrences has slots"
        states = self.cache.states[self.layer][place][self.slots]
        begins = self.positions[self.cu_seqlens[:-1].long()] == 0
        return states.masked_fill_(begins.view(-1, *[1] * (states.dim() - 1)), 0)

    def keep_states(self, place: int, states: Tensor) -> None:
        """Store the layer's states [S, ...] after the new tokens."""
        assert self.slots is not None, "a model with recurrences has slots"
        self.cache.states[self.layer][place][self.slots] = states

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention [T, H, C] of q [T, H, C] over the keys and values that `write` returned."""
        raise NotImplementedError


class DecodeLayout(CachedLayout):
    """One new token for each of S sequences; CUDA only, bf16 and fp16.

    Only the values in `tables` and `positions` change between passes, so a pass can be captured as a CUDA graph and
    replayed with new values in these tensors.

    Args:
        cache: the keys and values.
        tables: [W, S] int64; column s lists the blocks of sequence s in the order of its tokens.
        positions: [S] int64, the positions of the new tokens.
        slots: [S] int64, of the states of each sequence.

    Values in the tensors are not checked, since the host would wait. Raises RuntimeError if the kernel cannot run.
    """

    def __init__(self, cache: KeyValueCache, tables: Tensor, positions: Tensor, slots: Tensor | None = None) -> None:
        if (refusal := triton_refusal(positions.device.type)) is not None:
            raise RuntimeError(f"DecodeLayout cannot run here: {refusal}; use a MixedLayout")
        count = positions.shape[0]
        sequences = torch.arange(count, device=positions.device)
        ends = torch.arange(count + 1, dtype=torch.int32, device=positions.device)
        super().__init__(ends, positions, (1,) * count)
        self.cache = cache
        self.slots = slots
        self.tables = tables
        self.total_lengths = positions + 1
        self.new_rows = tables[positions // cache.block_size, sequences] * cache.block_size
        self.new_rows += positions % cache.block_size

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        """Uses a kernel that reads the blocks in place. Raises ValueError for what `decode_refusal` refuses."""
        if spec.softcap is not None:
            raise ValueError("DecodeLayout: its kernel has no cap on scores; use a MixedLayout")
        # Triton comes with torch's GPU builds, and may be missing elsewhere.
        from xorl.kernels.attention.paged_triton import paged_attention  # noqa: PLC0415

        return paged_attention(
            q.contiguous(),
            keys,
            values,
            self.tables,
            self.total_lengths,
            block_size=self.cache.block_size,
            scale=spec.scale,
            window=spec.window,
            sinks=sinks,
        )


def decode_refusal(request: AttentionRequest) -> str | None:
    """The reason why `DecodeLayout` cannot serve a request, or None if it can."""
    return uncapped_refusal(request) or flash_refusal(request, AMPERE) or triton_refusal(request.device_type)


class MixedLayout(CachedLayout):
    """Any number of new tokens of each sequence.

    Of a sequence's N tokens, the last n are new; keys and values of the others are in the cache.

    Args:
        cache: the keys and values.
        tables: the blocks of each sequence, in the order of its tokens, with room for at least N tokens.
        new: n for each sequence, at least 1.
        totals: N for each sequence.
        device: the device of the computation.
        slots: of the states of each sequence, all different; None: they have none.

    Attributes:
        max_seqlen: M.
        key_starts: [S + 1] int32, the offsets of the sequences' concatenated keys.
        total_lengths: [S] int64, N for each sequence.

    Raises ValueError for numbers of tokens or blocks that do not fit each other or the cache.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        tables: Sequence[Sequence[int]],
        new: Sequence[int],
        totals: Sequence[int],
        device: torch.device | str,
        slots: Sequence[int] | None = None,
    ) -> None:
        _check_sequences(cache, tables, new, totals)
        if slots is not None and (len(slots) != len(new) or len(set(slots)) < len(slots)):
            raise ValueError(f"slots: there must be one for each of {len(new)} sequences, all different; got {slots}")
        starts = list(accumulate(new, initial=0))
        ranges = [torch.arange(total - count, total) for count, total in zip(new, totals, strict=True)]
        positions = torch.cat(ranges)
        super().__init__(torch.tensor(starts, dtype=torch.int32).to(device), positions.to(device), new)
        self.cache = cache
        self.slots = None if slots is None else torch.tensor(slots, dtype=torch.int64).to(device)
        self.totals = tuple(totals)
        self.max_seqlen = max(totals)
        longest = max(len(table) for table in tables)
        padded = [[*table, *[0] * (longest - len(table))] for table in tables]
        self.tables = torch.tensor(padded, dtype=torch.int64).to(device)  # [S, blocks]
        self.total_lengths = torch.tensor(totals, dtype=torch.int64).to(device)
        self.key_starts = torch.tensor(list(accumulate(totals, initial=0)), dtype=torch.int32).to(device)
        sequence_of = torch.arange(len(new)).repeat_interleave(torch.tensor(new)).to(device)
        self.new_rows = self._rows(sequence_of, self.positions)  # [T]
        # Shared by the layouts of all layers, which are shallow copies of this one.
        self._read_rows: dict[str, Tensor] = {}

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        """Uses FlashAttention if it can run, else `scaled_dot_product_attention`."""
        request = AttentionRequest(q.device.type, q.dtype, q.shape[-1], spec.window, False, spec.softcap)
        attend = plain_cached_attention if native_refusal(request) else flash_cached_attention
        return attend(q, keys, values, self, spec, sinks)

    def packed_rows(self) -> Tensor:
        """[sum of N]: the cache rows of all tokens, sequence by sequence."""
        if "packed" not in self._read_rows:
            total = sum(self.totals)
            sequence_of = torch.arange(len(self.totals), device=self.tables.device)
            sequence_of = sequence_of.repeat_interleave(self.total_lengths, output_size=total)
            positions = torch.arange(total, device=self.tables.device) - self.key_starts[sequence_of]
            self._read_rows["packed"] = self._rows(sequence_of, positions)
        return self._read_rows["packed"]

    def padded_rows(self) -> Tensor:
        """[S, M]: the cache rows of each sequence's tokens; entries past its end are meaningless."""
        if "padded" not in self._read_rows:
            within = torch.arange(self.cache.block_size, device=self.tables.device)
            rows = (self.tables[:, :, None] * self.cache.block_size + within).flatten(1)
            self._read_rows["padded"] = rows[:, : self.max_seqlen]
        return self._read_rows["padded"]

    def _rows(self, sequence_of: Tensor, positions: Tensor) -> Tensor:
        block_size = self.cache.block_size
        return self.tables[sequence_of, positions // block_size] * block_size + positions % block_size


def _check_sequences(
    cache: KeyValueCache, tables: Sequence[Sequence[int]], new: Sequence[int], totals: Sequence[int]
) -> None:
    if not len(tables) == len(new) == len(totals) > 0:
        raise ValueError(
            f"tables, new and totals must be of the same sequences, at least one; got {len(tables)}, {len(new)} and "
            f"{len(totals)}"
        )
    for index, (table, count, total) in enumerate(zip(tables, new, totals, strict=True)):
        if not 1 <= count <= total:
            raise ValueError(f"new: {count} tokens of sequence {index} are new, which must be 1 to its {total} tokens")
        if len(table) * cache.block_size < total:
            raise ValueError(
                f"tables: the {len(table)} blocks of sequence {index} have room for {len(table) * cache.block_size} "
                f"tokens, not for {total}"
            )
        if not 0 <= min(table) <= max(table) < cache.num_blocks:
            raise ValueError(f"tables: sequence {index} has blocks outside [0, {cache.num_blocks}): {list(table)}")
        used = as_integers("tables", table)[: -(-total // cache.block_size)]
        if len(set(used)) < len(used):
            raise ValueError(f"tables: sequence {index} has a block twice: {list(used)}")


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: CachedLayout, spec: AttentionSpec, sinks: Tensor | None = None
) -> Tensor:
    """An `AttentionFn` for a `CachedLayout`: writes the new tokens' keys and values to the cache, then attends.

    The cache stores values with as many channels as keys: narrower values are padded.

    All writes come before all reads, so a sequence may read a block that another sequence writes in the same pass.

    Raises ValueError as an `AttentionFn` does, for a layout without a cache, and for values wider than keys.
    """
    check_type("layout", layout, CachedLayout, "a MixedLayout or DecodeLayout")
    check_inputs(q, k, v, layout, spec, sinks)
    if not spec.causal:
        raise ValueError("spec.causal: tokens that are generated see earlier ones only")
    num_channels = v.shape[-1]
    if num_channels > k.shape[-1]:
        raise ValueError(f"v: its heads are wider than those of k, {k.shape[-1]} channels; the cache has those of k")
    keys, values = layout.write(k, padded(v, k.shape[-1]))
    return cut(layout.attend(q, keys, values, spec, sinks), num_channels)


def plain_cached_attention(
    q: Tensor, keys: Tensor, values: Tensor, layout: MixedLayout, spec: AttentionSpec, sinks: Tensor | None = None
) -> Tensor:
    """Attention by `scaled_dot_product_attention`; sequences with one new token share a padded call.

    q is [T, H, C]; keys and values are all rows of the cache, [E * B, G, C].
    """
    out = torch.empty_like(q)
    rows, offsets = layout.padded_rows(), layout.offsets.tolist()
    single = [index for index, length in enumerate(layout.lengths) if length == 1]
    if single:
        sequences = torch.tensor(single, device=q.device)
        tokens = torch.tensor([offsets[index] for index in single], device=q.device)
        longest = max(layout.totals[index] for index in single)
        mask = _visible(layout.positions[tokens, None], longest, spec.window)  # [S, 1, M]
        key_rows = rows[sequences, :longest]
        # Padding reads rows of other sequences, and a weight of 0 times a non-finite value is NaN.
        is_padding = torch.arange(longest, device=q.device) >= layout.total_lengths[sequences, None]  # [S, M]
        k, v = (x[key_rows].masked_fill_(is_padding[:, :, None, None], 0) for x in (keys, values))
        out[tokens] = _attend(q[tokens, None], k, v, mask, spec, sinks)[:, 0]
    for index, (length, total) in enumerate(zip(layout.lengths, layout.totals, strict=True)):
        if length > 1:
            tokens = slice(offsets[index], offsets[index + 1])
            mask = _visible(layout.positions[None, tokens], total, spec.window)
            key_rows = rows[index : index + 1, :total]
            out[tokens] = _attend(q[None, tokens], keys[key_rows], values[key_rows], mask, spec, sinks)[0]
    return out


def flash_cached_attention(
    q: Tensor, keys: Tensor, values: Tensor, layout: MixedLayout, spec: AttentionSpec, sinks: Tensor | None = None
) -> Tensor:
    """Attention by torch's FlashAttention 2, with one launch for all sequences, over concatenated keys.

    Its causal mask is aligned with the last key of each sequence, which belongs to the last new token. CUDA only, fp16
    and bf16.
    """
    rows = layout.packed_rows()
    out, lse, *_ = flash_attention_forward(
        q,
        keys[rows],
        values[rows],
        layout.cu_seqlens,
        layout.key_starts,
        max(layout.lengths),
        layout.max_seqlen,
        0.0,
        spec.window is None,
        return_debug_mask=False,
        scale=spec.scale,
        window_size_left=-1 if spec.window is None else spec.window - 1,
        window_size_right=0,
    )
    return add_sinks(out, lse, sinks)[0]


def _visible(positions: Tensor, num_keys: int, window: int | None) -> Tensor:
    """[S, L, num_keys] bool: whether the token at positions [S, L] sees each key."""
    distance = positions[:, :, None] - torch.arange(num_keys, device=positions.device)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """Attention [S, L, H, C] of q [S, L, H, C] over k and v [S, M, G, C], with a mask [S, L, M]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if spec.softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=spec.scale, enable_gqa=grouped)
        return out.transpose(1, 2)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).to(wide) for x in (k, v))
    scores = q.to(wide) @ k.transpose(2, 3) * spec.scale  # [S, H, L, M]
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    scores.masked_fill_(~mask[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]]
    return (weights @ v).to(q.dtype).transpose(1, 2)
