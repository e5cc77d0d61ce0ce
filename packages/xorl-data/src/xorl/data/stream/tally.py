"""StreamTally: the counts of a stream's samples, which add up over ranks and resumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields

import numpy as np

from xorl.data.receipt import Counts, DatasetReceipt, Receipt
from xorl.data.stream.files import Stream
from xorl.data.stream.lane import StreamBin

_NUM_COUNTS = len(fields(Counts))


class StreamTally:
    """Counts over the bins that were returned to training.

    A sample is counted with the first bin of its lane that is completed after the sample was read, on the rank that
    gets that bin. So each read of a sample counts once, and once more in each epoch, for any number of ranks and
    workers and across resumes. Samples whose documents are still in open bins are already counted; samples that are
    only prefetched, or read again by a resume, are not.
    """

    def __init__(self, stream: Stream, saved: Sequence[int] | None = None) -> None:
        self._stream = stream
        # The counts of each entry, then the number of bins and the number of tokens in them.
        self.values = np.zeros(len(stream.entries) * _NUM_COUNTS + 2, dtype=np.int64)
        if saved is not None:
            self.values[:] = saved

    def add(self, member: StreamBin) -> None:
        """Adds a bin and the counts of the chunks read for it."""
        for entry, counts in member.read:
            self.values[entry * _NUM_COUNTS : (entry + 1) * _NUM_COUNTS] += np.array(astuple(counts))
        self.values[-2:] += 1, sum(len(document.input_ids) for document in member.documents)

    def receipt(self, plan_hash: str | None) -> Receipt:
        """The counts as a receipt; `plan_hash` (StreamPlan.hash) identifies the stream and its order."""
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
