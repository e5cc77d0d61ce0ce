"""The first documents of a stream, for inspection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, islice

import numpy as np

from xorl.data.arguments import checked
from xorl.data.errors import DataError
from xorl.data.formats import EncodedDocuments
from xorl.data.hashing import permutation
from xorl.data.invariants import check_ids, log_findings, validate_counts
from xorl.data.receipt import Counts, DatasetReceipt, Findings, Receipt
from xorl.data.stream.files import BlockTable, Stream
from xorl.data.stream.loader import stream_bins
from xorl.data.stream.order import StreamOrder
from xorl.data.stream.reading import block_chunks

# The samples per entry that are checked before training: enough for limits of 1 %, in blocks that are read in a second.
_CHECKED_SAMPLES = 1000
_CHECKED_BLOCKS = 8


class StreamSample:
    """Documents of the first epoch in reading order, for `dataset_statistics`.

    `is_all`: whether the epoch has no other documents. `fills` [B] are the fills of the first bins, as fractions, for
    as many bins as the documents would fill.
    """

    def __init__(self, stream: Stream, chunks: list[tuple[int, EncodedDocuments]], *, is_all: bool) -> None:
        self._chunks = [encoded for _, encoded in chunks]
        self._starts = np.array([0, *accumulate(len(chunk.lengths) for chunk in self._chunks)])
        self._offsets = [np.cumsum(chunk.lengths) - chunk.lengths for chunk in self._chunks]
        self._datasets = np.repeat([index for index, _ in chunks], np.diff(self._starts))
        self.lengths = np.concatenate([chunk.lengths for chunk in self._chunks])  # [N] int64
        self.num_trained = np.concatenate([chunk.num_trained for chunk in self._chunks])  # [N], after the shift
        self.is_all = is_all
        bin_len = stream.options.bin_len
        num_bins = max(1, int(self.lengths.sum()) // bin_len)
        bins = islice(stream_bins(stream, first=0, stride=1), num_bins)
        tokens = [sum(len(document.input_ids) for document in member.documents) for member in bins]
        self.fills = np.array(tokens) / bin_len
        counts = [
            sum((encoded.counts for index, encoded in chunks if index == entry), Counts())
            for entry in range(len(stream.entries))
        ]
        datasets = [DatasetReceipt(entry.name, count) for entry, count in zip(stream.entries, counts, strict=True)]
        fill = float(self.fills.mean())
        self.receipt = Receipt(tuple(datasets)).with_bins(
            num_bins=num_bins, fill=fill, plan_hash=None, packed={"tokens": sum(tokens)}
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """As in PreparedDocuments; all documents are distinct, because no block is read twice."""
        indices = np.arange(len(self))
        return indices, indices

    def datasets(self) -> np.ndarray:
        """[N]: the dataset of each document, as its index in the receipt."""
        return self._datasets

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, labels) of document `index`, int32, not shifted, read-only."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        chunk, inner = self._chunks[number], index - int(self._starts[number])
        start = int(self._offsets[number][inner])
        span = slice(start, start + int(chunk.lengths[inner]))
        ids = chunk.input_ids[span]
        return ids, ids if chunk.labels is None else chunk.labels[span]


def check_first_samples(stream: Stream, *, strict: bool = True) -> Stream:
    """Applies the checks of prepared data to some samples of each entry, drawn by the seed; adds the findings.

    Reads a thousand samples, or all if there are fewer. If documents are long, it reads only a few blocks, and then
    only checks whether any token is trained. Raises DataError for data with which a run must not start; without
    `strict`, logs the error.
    """
    found: list[Findings] = []
    for index, entry in enumerate(stream.entries):
        counts, findings, table = Counts(), Findings(), BlockTable(entry)
        order = permutation(entry.num_blocks, "judged", stream.options.seed, index)
        chunks = (
            chunk
            for block in order[:_CHECKED_BLOCKS]
            for chunk in block_chunks(*table[int(block)], entry.format.selected, entry.option)
        )
        is_all = entry.num_blocks <= _CHECKED_BLOCKS
        for chunk in chunks:
            if counts.samples >= _CHECKED_SAMPLES:
                is_all = False
                break
            encoded = entry.format.encode(chunk)
            check_ids(encoded, chunk, entry.format)
            counts += encoded.counts
            findings += encoded.findings
        log_findings(findings, counts, entry.name, entry.limits.skipped_fraction)
        found.append(findings)
        if is_all or counts.samples >= _CHECKED_SAMPLES or (counts.samples and not counts.trained_tokens):
            validate_counts(counts, entry.name, entry.format, entry.option, entry.limits, strict=strict)
    return replace(stream, findings=tuple(found))


@checked
def read_sample(stream: Stream, num_documents: int) -> StreamSample:
    """The first `num_documents` of a stream and the rest of their last chunk, or all if there are fewer.

    Raises DataError if data cannot be read, or if a whole epoch has no documents.
    """
    chunks: list[tuple[int, EncodedDocuments]] = []
    is_all, num = True, 0
    for entry, encoded in _chunks(stream):
        if num >= num_documents:
            is_all = False
            break
        chunks.append((entry, encoded))
        num += len(encoded.lengths)
    if not num:
        raise DataError("the stream has no documents in a whole epoch")
    return StreamSample(stream, chunks, is_all=is_all)


def _chunks(stream: Stream) -> Iterator[tuple[int, EncodedDocuments]]:
    """Yields (entry, encoded chunk) of the first cycle. Blocks that a mixture repeats are read once."""
    order, tables = StreamOrder(stream), [BlockTable(entry) for entry in stream.entries]
    seen: set[tuple[int, int]] = set()
    for position in range(order.blocks_per_cycle):
        index, number = order.block(position % order.num_lanes, position // order.num_lanes)
        if (index, number) in seen:
            continue
        seen.add((index, number))
        entry = stream.entries[index]
        file, inner = tables[index][number]
        for chunk in block_chunks(file, inner, entry.format.selected, entry.option):
            yield index, entry.format.encode(chunk)
