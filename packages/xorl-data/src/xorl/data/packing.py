"""Packs documents, given by their lengths, into bins of bounded length. Pure functions of their arguments."""

from __future__ import annotations

import multiprocessing
from bisect import bisect_left, insort
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import xxhash

from xorl.data.arguments import check_at_least, checked
from xorl.data.hashing import permutation
from xorl.data.orphans import exit_with_parent

PackingMethod = Literal["sequential", "multipack", "none"]
StartMethod = Literal["fork", "spawn", "forkserver"]

# More open bins improve the fill and reorder more; beyond 64 the fill improves by less than 0.1 %.
_OPEN_BINS = 64
_WORD_BITS = 1024


@dataclass(frozen=True)
class Bins:
    """Bin b holds the documents `indices[offsets[b] : offsets[b + 1]]`. Every document is in exactly one bin."""

    indices: np.ndarray  # int64, one per document
    offsets: np.ndarray  # [num_bins + 1] int64
    num_tokens: int
    bin_len: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def documents(self, index: int) -> np.ndarray:
        return self.indices[self.offsets[index] : self.offsets[index + 1]]

    @property
    def fill(self) -> float:
        """The fraction of the bins' capacity that holds tokens."""
        return self.num_tokens / max(1, len(self) * self.bin_len)

    def fills(self, lengths: np.ndarray) -> np.ndarray:
        """The fill of each bin, as a fraction, given the documents' lengths [N]."""
        if not len(self):
            return np.empty(0)
        return np.add.reduceat(lengths[self.indices], self.offsets[:-1]) / self.bin_len

    @property
    def digest(self) -> str:
        hasher = xxhash.xxh3_128(np.ascontiguousarray(self.indices).data)
        hasher.update(np.ascontiguousarray(self.offsets).data)
        return hasher.hexdigest()


@checked
def pack(
    lengths: np.ndarray | Sequence[int],
    *,
    bin_len: int,
    method: PackingMethod = "sequential",
    group_size: int = 100_000,
    strict_order: bool = False,
    seed: int = 0,
    start_method: StartMethod | None = None,
    num_proc: int = 1,
) -> Bins:
    """Packs documents of `lengths` (each from 1 to `bin_len` tokens) into bins of at most `bin_len` tokens.

    `sequential` is best fit into a window of open bins, which bounds the reordering. `strict_order`, with any method,
    keeps the order: a document that does not fit closes the bin. `multipack` is best-fit decreasing within groups of
    `group_size` documents, with the bins shuffled by `seed`; with a `start_method`, `num_proc` processes pack the
    groups. `none` puts every document into a separate bin.

    Raises ValueError for lengths that are not integers, and for a document that does not fit.
    """
    check_at_least(1, bin_len=bin_len, group_size=group_size, num_proc=num_proc)
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or (lengths.size and lengths.dtype.kind not in "iu"):
        raise ValueError(f"lengths: got {lengths.dtype} of shape {list(lengths.shape)}, want [N] integers")
    lengths = lengths.astype(np.int64, copy=False)
    if len(wrong := np.flatnonzero((lengths < 1) | (lengths > bin_len))):
        raise ValueError(
            f"lengths: document {wrong[0]} has {lengths[wrong[0]]} tokens, but must have from 1 to bin_len, {bin_len}"
        )
    if strict_order and method != "none":
        bins = _next_fit(lengths, bin_len)
    elif method == "sequential":
        bins = _windowed_best_fit(lengths.tolist(), bin_len)
    elif method == "multipack":
        bins = _pack_groups(lengths, bin_len, group_size, start_method, num_proc)
        bins = [bins[index] for index in permutation(len(bins), "bins", seed)]
    else:
        bins = [[index] for index in range(len(lengths))]
    sizes = np.fromiter(map(len, bins), dtype=np.int64, count=len(bins))
    indices = np.fromiter((index for members in bins for index in members), dtype=np.int64, count=len(lengths))
    return Bins(indices, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]), int(lengths.sum()), bin_len)


def _next_fit(lengths: np.ndarray, bin_len: int) -> list[range]:
    ends = np.cumsum(lengths)
    bins, start, before = [], 0, 0
    while start < len(lengths):
        stop = int(np.searchsorted(ends, before + bin_len, side="right"))
        bins.append(range(start, stop))
        start, before = stop, int(ends[stop - 1])
    return bins


def _windowed_best_fit(lengths: list[int], bin_len: int) -> list[list[int]]:
    window = OpenBins(bin_len)
    bins: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        bins.update(window.add(index, length))
    bins.update(window.flush())
    return [bins[number] for number in range(len(bins))]


class OpenBins:
    """Online best fit: each document goes into the open bin with the least sufficient room.

    A bin is emitted when it is full. If a new bin would exceed the number of open bins, the fullest one is emitted,
    because it is the least likely to fit another document. Bins are numbered in the order in which they were opened.
    """

    def __init__(self, bin_len: int, num_open: int = _OPEN_BINS) -> None:
        self._bin_len = bin_len
        self._num_open = num_open
        self._num_bins = 0
        self._members: dict[int, list[int]] = {}
        # (room left, bin), ascending: the first with enough room is the best fit; of equal ones, the oldest.
        self._rooms: list[tuple[int, int]] = []

    def add(self, index: int, length: int) -> list[tuple[int, list[int]]]:
        """Puts document `index` into a bin. Returns the emitted bins as (number, members): zero to two."""
        rooms = self._rooms
        emitted: list[tuple[int, list[int]]] = []
        at = bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, number = rooms.pop(at)
            self._members[number].append(index)
        else:
            if len(rooms) == self._num_open:
                emitted.append(self._emit(rooms.pop(0)[1]))
            room, number = self._bin_len, self._num_bins
            self._num_bins += 1
            self._members[number] = [index]
        if room > length:
            insort(rooms, (room - length, number))
        else:
            emitted.append(self._emit(number))
        return emitted

    def flush(self) -> list[tuple[int, list[int]]]:
        """Emits the bins that are still open, in the order in which they were opened."""
        self._rooms = []
        return [self._emit(number) for number in sorted(self._members)]

    def _emit(self, number: int) -> tuple[int, list[int]]:
        return number, self._members.pop(number)


def _pack_groups(
    lengths: np.ndarray, bin_len: int, group_size: int, start_method: StartMethod | None, num_proc: int
) -> list[list[int]]:
    starts = range(0, len(lengths), group_size)
    groups = [lengths[start : start + group_size] for start in starts]
    if start_method is None or num_proc <= 1 or len(groups) <= 1:
        packed = [best_fit_decreasing(group, bin_len) for group in groups]
    else:
        context, num_proc = multiprocessing.get_context(start_method), min(num_proc, len(groups))
        with ProcessPoolExecutor(num_proc, mp_context=context, initializer=exit_with_parent) as pool:
            packed = list(pool.map(partial(best_fit_decreasing, bin_len=bin_len), groups))
    return [
        [start + index for index in members] for start, group in zip(starts, packed, strict=True) for members in group
    ]


def best_fit_decreasing(lengths: np.ndarray, bin_len: int) -> list[list[int]]:
    """Packs the longest documents first, each into the bin with the least sufficient room. Sorts each bin by index."""
    rooms = _Rooms(bin_len)
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    order = np.argsort(-lengths, kind="stable")
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        room = rooms.smallest_from(length)
        if room is None:
            room, bin_index = bin_len, len(bins)
            bins.append([index])
        else:
            same = by_room[room]
            bin_index = same.pop()
            if not same:
                rooms.flip(room)
            bins[bin_index].append(index)
        left = room - length
        if left:
            same = by_room.setdefault(left, [])
            if not same:
                rooms.flip(left)
            same.append(bin_index)
    for members in bins:
        members.sort()
    return bins


class _Rooms:
    """A set of integers from 0 to `largest` as a two-level bitmap, which finds the smallest member >= a value."""

    def __init__(self, largest: int) -> None:
        self._words = [0] * (largest // _WORD_BITS + 1)
        self._filled = 0

    def flip(self, value: int) -> None:
        """Inserts `value`, or removes it."""
        word, bit = divmod(value, _WORD_BITS)
        before = self._words[word]
        self._words[word] = after = before ^ (1 << bit)
        if not before or not after:
            self._filled ^= 1 << word

    def smallest_from(self, value: int) -> int | None:
        word, bit = divmod(value, _WORD_BITS)
        rest = self._words[word] >> bit
        if rest:
            return value + (rest & -rest).bit_length() - 1
        filled = self._filled >> (word + 1)
        if not filled:
            return None
        word += (filled & -filled).bit_length()
        rest = self._words[word]
        return word * _WORD_BITS + (rest & -rest).bit_length() - 1
