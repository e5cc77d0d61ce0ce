"""The first documents of a stream, for inspection."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice

import numpy as np

from xorl.data.errors import DataError
from xorl.data.formats import EncodedDocuments
from xorl.data.invariants import check_ids, judge
from xorl.data.receipt import Counts, DatasetReceipt, Receipt
from xorl.data.shuffle import permutation
from xorl.data.stream.files import BlockTable, Stream
from xorl.data.stream.loader import stream_bins
from xorl.data.stream.order import StreamOrder
from xorl.data.stream.reading import block_pieces

# The samples judged before training: enough for a limit of one in a hundred, in blocks that take a second to read.
_JUDGED_SAMPLES = 1000
_JUDGED_BLOCKS = 8


class StreamSample:
    """Documents of the first epoch in reading order, for `dataset_statistics`.

    `is_all` says whether they are the whole epoch; `fills` [B] is the fill of the first bins as fractions, for as many
    bins as the documents fill.
    """

    def __init__(self, stream: Stream, pieces: list[tuple[int, EncodedDocuments]], *, is_all: bool) -> None:
        self._pieces = [encoded for _, encoded in pieces]
        self._starts = np.array([0, *accumulate(len(piece.lengths) for piece in self._pieces)])
        self._offsets = [np.cumsum(piece.lengths) - piece.lengths for piece in self._pieces]
        self._datasets = np.repeat([index for index, _ in pieces], np.diff(self._starts))
        self.lengths = np.concatenate([piece.lengths for piece in self._pieces])  # [N] int64
        self.num_trained = np.concatenate([piece.num_trained for piece in self._pieces])  # [N], after the shift
        self.is_all = is_all
        bin_len = stream.options.bin_len
        num_bins = max(1, int(self.lengths.sum()) // bin_len)
        bins = islice(stream_bins(stream, first=0, stride=1), num_bins)
        tokens = [sum(len(document.input_ids) for document in member.documents) for member in bins]
        self.fills = np.array(tokens) / bin_len
        counts = [
            sum((encoded.counts for index, encoded in pieces if index == entry), Counts())
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
        """As in PreparedDocuments: no block was read twice."""
        places = np.arange(len(self))
        return places, places

    def datasets(self) -> np.ndarray:
        """[N]: the dataset of the document at each place, as its index in the receipt."""
        return self._datasets

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, labels) of document `index`, int32, not shifted, read-only."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        piece, inner = self._pieces[number], index - int(self._starts[number])
        start = int(self._offsets[number][inner])
        span = slice(start, start + int(piece.lengths[inner]))
        ids = piece.input_ids[span]
        return ids, ids if piece.labels is None else piece.labels[span]


def judge_beginning(stream: Stream, *, stops: bool = True) -> None:
    """Judges the first samples of each entry, in an order by the seed, by the same checks as prepared data.

    It reads a thousand samples, or all if there are fewer. With long documents it reads those of some blocks, and then
    only checks whether anything is trained. Raises DataError for data that stops a run, or (without `stops`) logs it.
    """
    for index, entry in enumerate(stream.entries):
        counts, table = Counts(), BlockTable(entry)
        order = permutation(entry.num_blocks, "judged", stream.options.seed, index)
        pieces = (
            piece
            for block in order[:_JUDGED_BLOCKS]
            for piece in block_pieces(*table[int(block)], entry.form.selected, entry.option)
        )
        is_all = entry.num_blocks <= _JUDGED_BLOCKS
        for piece in pieces:
            if counts.samples >= _JUDGED_SAMPLES:
                is_all = False
                break
            encoded = entry.form.encode(piece)
            check_ids(encoded, piece, entry.form)
            counts += encoded.counts
        if is_all or counts.samples >= _JUDGED_SAMPLES or (counts.samples and not counts.trained_tokens):
            judge(counts, entry.name, entry.form, entry.option, entry.allowed, stops=stops)


def read_sample(stream: Stream, num_documents: int) -> StreamSample:
    """The first documents of a stream: `num_documents` and the rest of their last piece, or all if there are fewer.

    DataError if data cannot be read, or if a whole epoch holds no document.
    """
    pieces: list[tuple[int, EncodedDocuments]] = []
    is_all, num = True, 0
    for entry, encoded in _pieces(stream):
        if num >= num_documents:
            is_all = False
            break
        pieces.append((entry, encoded))
        num += len(encoded.lengths)
    if not num:
        raise DataError("nothing is left of the stream: a whole epoch of it has no document")
    return StreamSample(stream, pieces, is_all=is_all)


def _pieces(stream: Stream) -> Iterator[tuple[int, EncodedDocuments]]:
    """The pieces of the first cycle with their entry; no block twice, whatever a mixture repeats."""
    order, tables = StreamOrder(stream), [BlockTable(entry) for entry in stream.entries]
    seen: set[tuple[int, int]] = set()
    for place in range(order.blocks_per_cycle):
        _, index, number = order.block(place % order.num_lanes, place // order.num_lanes)
        if (index, number) in seen:
            continue
        seen.add((index, number))
        entry = stream.entries[index]
        file, inner = tables[index][number]
        for piece in block_pieces(file, inner, entry.form.selected, entry.option):
            yield index, entry.form.encode(piece)
