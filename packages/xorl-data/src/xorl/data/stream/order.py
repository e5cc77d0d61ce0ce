"""The order of a stream: which block comes where, in which lane. Functions of (stream, seed, epoch) alone.

A lane is a stream of its own that takes every L-th block; bin k of the whole is bin k // L of lane k % L. The number of
lanes depends on the data alone, so bin k is the same on any number of ranks and workers. If the numbers divide, each of
them reads only the lanes of its own bins.
"""

from __future__ import annotations

import numpy as np

from xorl.data.mixture import Share, drawn_rows
from xorl.data.shuffle import permutation
from xorl.data.stream.files import Stream, StreamEntry

# Bins' worth of tokens packed together; the documents left at the end of a run are packed best-fit decreasing.
RUN_BINS = 256
# Divisible by most numbers of ranks. A lane should have several runs, or small data would be read in many epochs at
# once.
_NUM_LANES = (192, 96, 64, 32, 16, 8, 4, 2, 1)
_RUNS_PER_LANE = 8
# Bytes of text per token, to compute the number of lanes only.
_BYTES_PER_TOKEN = 4
# The relative deviation of a share from the requested one: less than a user would notice.
_SHARE_TOLERANCE = 0.03
# Enough for one block in a thousand, and few enough to try all at once.
_MOST_EPOCHS = 4096


class StreamOrder:
    """The endless sequence of blocks of a stream, epoch after epoch."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._drawn = _blocks_of_epochs(_wanted_blocks(stream.entries))
        self._ends = np.cumsum(self._drawn.sum(axis=1))
        self._fingerprint = stream.fingerprint
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.blocks_per_cycle = int(self._ends[-1])
        runs = stream.num_bytes / (RUN_BINS * stream.options.bin_len * _BYTES_PER_TOKEN)
        most = min(runs / _RUNS_PER_LANE, self.blocks_per_cycle / len(self._ends))
        self.num_lanes = next((num for num in _NUM_LANES if num <= most), 1)

    def block(self, lane: int, index: int) -> tuple[int, int, int]:
        """(epoch, entry, block of the entry) of the `index`-th block of a lane."""
        cycle, place = divmod(index * self.num_lanes + lane, self.blocks_per_cycle)
        number = int(np.searchsorted(self._ends, place, side="right"))
        epoch = cycle * len(self._ends) + number
        if epoch not in self._epochs:
            # Lanes end their epochs at about the same time: two are enough.
            self._epochs = {known: self._epochs[known] for known in (epoch - 1, epoch + 1) if known in self._epochs}
            self._epochs[epoch] = self._epoch(epoch)
        entries, blocks = self._epochs[epoch]
        position = place - int(self._ends[number]) + len(blocks)
        return epoch, int(entries[position]), int(blocks[position])

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(entry, block) at every place of an epoch; if an entry is used in part, each epoch uses another part."""
        key = (self._fingerprint, self._stream.options.seed, epoch)
        drawn = self._drawn[epoch % len(self._drawn)].tolist()
        parts = [
            drawn_rows(entry.num_blocks, num, "stream", *key, index)
            for index, (entry, num) in enumerate(zip(self._stream.entries, drawn, strict=True))
        ]
        entries = np.repeat(np.arange(len(parts), dtype=np.int32), drawn)
        blocks = np.concatenate(parts)
        if not self._stream.options.shuffle:
            return entries, blocks
        order = permutation(len(blocks), "stream", *key)
        return entries[order], blocks[order]


def _wanted_blocks(entries: tuple[StreamEntry, ...]) -> list[float]:
    """The blocks of each entry in an epoch, not rounded.

    With weights, an epoch has about as many bytes as all files together, divided in proportion; otherwise `num_epochs`.
    """
    shares: list[Share] = [entry.share for entry in entries]
    weights = [share.weight for share in shares if share.weight is not None]
    if len(weights) < len(shares):
        times = [1.0 if share.num_epochs is None else share.num_epochs for share in shares]
        return [entry.num_blocks * factor for entry, factor in zip(entries, times, strict=True)]
    total = sum(entry.num_bytes for entry in entries)
    wanted = [total * weight / sum(weights) for weight in weights]
    return [num_bytes / entry.num_bytes * entry.num_blocks for entry, num_bytes in zip(entries, wanted, strict=True)]


def _blocks_of_epochs(wanted: list[float]) -> np.ndarray:
    """[epochs of a cycle, entries] int64: the whole blocks in each epoch of a cycle, whose sum is `wanted`.

    A compressed file is one block, and a tenth of it is one in ten epochs. A cycle is as short as the shares allow.
    """
    num_epochs = np.arange(1, _MOST_EPOCHS + 1)[:, None]
    drawn = np.maximum(1, np.round(num_epochs * np.array(wanted))).astype(np.int64)
    misses = np.abs(drawn / drawn.sum(axis=1, keepdims=True) / (np.array(wanted) / sum(wanted)) - 1).max(axis=1)
    close = np.flatnonzero(misses <= _SHARE_TOLERANCE)
    num = int(close[0] if len(close) else misses.argmin()) + 1
    return np.diff(drawn[num - 1] * np.arange(num + 1)[:, None] // num, axis=0)
