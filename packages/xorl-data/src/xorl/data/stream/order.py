"""The order of a stream: which block comes where, in which lane. Functions of (stream, seed, epoch) alone.

A lane is a stream of its own that takes every L-th block; bin k of the whole is bin k // L of lane k % L. How many
lanes there are depends on the data alone, so that bin k is the same on any number of ranks and workers, each of which
reads the lanes of its own bins and no others wherever the numbers divide.
"""

from __future__ import annotations

import numpy as np

from xorl.data.mixture import Share, drawn_rows
from xorl.data.shuffle import permutation
from xorl.data.stream.files import Stream, StreamEntry

# Bins' worth of tokens that are packed together; what is left over at the end of a run is packed best-fit decreasing.
RUN_BINS = 256
# Divisible by most numbers of ranks; a lane should have some runs to do, or small data would be read in many epochs
# at once.
_NUM_LANES = (192, 96, 64, 32, 16, 8, 4, 2, 1)
_RUNS_PER_LANE = 8
# For counting lanes only: what a token takes as text.
_BYTES_PER_TOKEN = 4


class StreamOrder:
    """The endless sequence of blocks of a stream, epoch after epoch."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._drawn = _blocks_per_epoch(stream.entries)
        self._fingerprint = stream.fingerprint
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.blocks_per_epoch = sum(self._drawn)
        runs = stream.num_bytes / (RUN_BINS * stream.options.bin_len * _BYTES_PER_TOKEN)
        most = min(runs / _RUNS_PER_LANE, self.blocks_per_epoch)
        self.num_lanes = next((num for num in _NUM_LANES if num <= most), 1)

    def block(self, lane: int, index: int) -> tuple[int, int, int]:
        """(epoch, entry, block of the entry) of the `index`-th block of a lane."""
        epoch, position = divmod(index * self.num_lanes + lane, self.blocks_per_epoch)
        if epoch not in self._epochs:
            # Lanes end their epochs at about the same time: two are all that is needed.
            self._epochs = {known: self._epochs[known] for known in (epoch - 1, epoch + 1) if known in self._epochs}
            self._epochs[epoch] = self._epoch(epoch)
        entries, blocks = self._epochs[epoch]
        return epoch, int(entries[position]), int(blocks[position])

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(entry, block) of every place of an epoch; of what is taken in part, another part in every epoch."""
        key = (self._fingerprint, self._stream.options.seed, epoch)
        parts = [
            drawn_rows(entry.num_blocks, num, "stream", *key, index)
            for index, (entry, num) in enumerate(zip(self._stream.entries, self._drawn, strict=True))
        ]
        entries = np.repeat(np.arange(len(parts), dtype=np.int32), self._drawn)
        blocks = np.concatenate(parts)
        if not self._stream.options.shuffle:
            return entries, blocks
        order = permutation(len(blocks), "stream", *key)
        return entries[order], blocks[order]


def _blocks_per_epoch(entries: tuple[StreamEntry, ...]) -> list[int]:
    """By weights, an epoch is about as many bytes as all files together, divided in proportion; else `num_epochs`."""
    shares: list[Share] = [entry.share for entry in entries]
    weights = [share.weight for share in shares if share.weight is not None]
    if len(weights) < len(shares):
        times = [1.0 if share.num_epochs is None else share.num_epochs for share in shares]
        return [max(1, round(entry.num_blocks * factor)) for entry, factor in zip(entries, times, strict=True)]
    total = sum(entry.num_bytes for entry in entries)
    wanted = [total * weight / sum(weights) for weight in weights]
    return [
        max(1, round(num_bytes / entry.num_bytes * entry.num_blocks))
        for entry, num_bytes in zip(entries, wanted, strict=True)
    ]
