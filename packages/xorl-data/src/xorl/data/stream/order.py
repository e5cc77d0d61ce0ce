"""The order of the blocks of a stream and their division into lanes. It depends only on (stream, seed, epoch).

Each of the L lanes takes every L-th block and packs its own bins; bin k of the stream is bin k // L of lane k % L. L
depends only on the data, so bin k is the same for any number of ranks and workers. If that number divides L, each rank
or worker reads only the lanes of its own bins.
"""

from __future__ import annotations

import numpy as np

from xorl.data.hashing import permutation
from xorl.data.mixture import Share, drawn_rows
from xorl.data.stream.files import Stream, StreamEntry

# The length of a run, in bins. Documents in open bins at the end of a run are packed again, best-fit decreasing.
RUN_BINS = 256
# Divisible by most numbers of ranks. A lane should have several runs; otherwise lanes of small data would read several
# epochs at the same time.
_NUM_LANES = (192, 96, 64, 32, 16, 8, 4, 2, 1)
_RUNS_PER_LANE = 8
# An estimate of the bytes of text per token, used only for the number of lanes.
_BYTES_PER_TOKEN = 4
# The accepted relative deviation from a requested share, too small for a user to notice.
_SHARE_TOLERANCE = 0.03
# Enough for one block in a thousand, and few enough to try all values at once.
_MAX_CYCLE_EPOCHS = 4096


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
        max_lanes = min(runs / _RUNS_PER_LANE, self.blocks_per_cycle / len(self._ends))
        self.num_lanes = next((num for num in _NUM_LANES if num <= max_lanes), 1)

    def block(self, lane: int, index: int) -> tuple[int, int]:
        """(entry, block of the entry) of the `index`-th block of a lane."""
        cycle, offset = divmod(index * self.num_lanes + lane, self.blocks_per_cycle)
        number = int(np.searchsorted(self._ends, offset, side="right"))
        epoch = cycle * len(self._ends) + number
        if epoch not in self._epochs:
            # Lanes end their epochs at about the same time, so caching two epochs is enough.
            self._epochs = {known: self._epochs[known] for known in (epoch - 1, epoch + 1) if known in self._epochs}
            self._epochs[epoch] = self._epoch(epoch)
        entries, blocks = self._epochs[epoch]
        position = offset - int(self._ends[number]) + len(blocks)
        return int(entries[position]), int(blocks[position])

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The entries and blocks of an epoch, in order. An entry used in part contributes other blocks each time."""
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
    """The number of blocks of each entry in an epoch, not rounded.

    With weights, an epoch has about as many bytes as all files together, divided in proportion to the weights.
    Otherwise an entry contributes its blocks `num_epochs` times.
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
    """[epochs of a cycle, entries] int64: rounds `wanted` to whole blocks, exactly enough on average over a cycle.

    A compressed file is one block, so a tenth of it means one block in ten epochs. The cycle is the shortest one that
    keeps all shares within _SHARE_TOLERANCE.
    """
    num_epochs = np.arange(1, _MAX_CYCLE_EPOCHS + 1)[:, None]
    drawn = np.maximum(1, np.round(num_epochs * np.array(wanted))).astype(np.int64)
    misses = np.abs(drawn / drawn.sum(axis=1, keepdims=True) / (np.array(wanted) / sum(wanted)) - 1).max(axis=1)
    close = np.flatnonzero(misses <= _SHARE_TOLERANCE)
    num = int(close[0] if len(close) else misses.argmin()) + 1
    return np.diff(drawn[num - 1] * np.arange(num + 1)[:, None] // num, axis=0)
