"""Tally: what happened to the samples of a stream, as counts that add up over ranks and resumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields

import numpy as np

from xorl.data.receipt import Counts, DatasetReceipt, Receipt
from xorl.data.stream.files import Stream
from xorl.data.stream.lane import StreamBin

_NUM_COUNTS = len(fields(Counts))


class Tally:
    """Counts over the bins that were returned to training.

    Bins and tokens are counted for the bins themselves. Samples are counted with the first bin of their lane that is
    finished after they were read, on the rank that gets that bin. So each reading of a sample counts once, and each
    epoch counts again, on any number of ranks and workers and over resumes. A document that still waits in a lane's
    open bins is counted before it is trained on; what is read ahead, or read again by a resume, is not counted.
    """

    def __init__(self, stream: Stream, saved: Sequence[int] | None = None) -> None:
        self._stream = stream
        # The counts of each entry, then bins and tokens in them.
        self.values = np.zeros(len(stream.entries) * _NUM_COUNTS + 2, dtype=np.int64)
        if saved is not None:
            self.values[:] = saved

    def add(self, member: StreamBin) -> None:
        """Count a bin."""
        for entry, counts in member.read:
            self.values[entry * _NUM_COUNTS : (entry + 1) * _NUM_COUNTS] += np.array(astuple(counts))
        self.values[-2:] += 1, sum(len(document.input_ids) for document in member.documents)

    def receipt(self, plan_hash: str | None) -> Receipt:
        """The receipt of what was counted; `plan_hash` names the stream and its order (StreamPlan.hash)."""
        values = self.values.tolist()
        datasets = [
            DatasetReceipt(entry.name, Counts(*values[index * _NUM_COUNTS : (index + 1) * _NUM_COUNTS]))
            for index, entry in enumerate(self._stream.entries)
        ]
        num_bins, num_tokens = values[-2:]
        fill = num_tokens / (max(1, num_bins) * self._stream.options.bin_len)
        return Receipt(tuple(datasets)).with_bins(
            num_bins=num_bins, fill=fill, plan_hash=plan_hash, packed={"tokens": num_tokens}
        )
