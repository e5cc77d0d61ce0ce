"""One lane of a stream: blocks to documents to bins, from any run on. A pure function of the stream and the lane."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from xorl.data.collate import Document
from xorl.data.errors import DataError
from xorl.data.formats import EncodedDocuments
from xorl.data.invariants import check_ids
from xorl.data.invariants import judge as judge_counts
from xorl.data.packing import OpenBins, best_fit_decreasing
from xorl.data.readers import Piece
from xorl.data.receipt import Counts
from xorl.data.shuffle import permutation
from xorl.data.stream.files import BlockTable, Stream
from xorl.data.stream.order import RUN_BINS, StreamOrder
from xorl.data.stream.reading import block_pieces

# Fewer open bins than for prepared data: each holds its documents in memory, in each of many lanes.
_OPEN_BINS = 32
# Counts are judged as soon as they are meaningful, then less and less often.
_FIRST_JUDGED = 1000


@dataclass(frozen=True)
class RunStart:
    """Where a run of a lane begins: the number of its first bin in the lane, and the next block and piece to read."""

    first_bin: int = 0
    block: int = 0
    piece: int = 0


@dataclass(frozen=True)
class StreamBin:
    """A packed bin: its documents, its number in its lane, and the start of its run.

    `read` are the counts, with their entry, of the pieces read since the lane's previous bin. They depend on the bin
    alone, so their sum over bins is the count of everything read, whichever rank gets which bin.
    """

    lane: int
    number: int
    run: RunStart
    documents: tuple[Document, ...]
    read: tuple[tuple[int, Counts], ...] = ()


class Lane:
    """The endless bins of lane `lane`, from the run `start` on."""

    def __init__(self, stream: Stream, order: StreamOrder, lane: int, start: RunStart | None = None) -> None:
        self._stream = stream
        self._lane = lane
        self._order = order
        self._tables = [BlockTable(entry) for entry in stream.entries]
        self._judges = [_Judge() for _ in stream.entries]
        self._run = start or RunStart()
        self._read: list[tuple[int, Counts]] = []

    def bins(self) -> Iterator[StreamBin]:
        """Yields bins. DataError if data cannot be read, or if a whole epoch holds no document."""
        pieces = self._pieces()
        while True:
            run, number = self._run, self._run.first_bin
            for members in self._pack_run(pieces):
                read, self._read = tuple(self._read), []
                yield StreamBin(self._lane, number, run, members, read)
                number += 1
            self._run = RunStart(number, self._run.block, self._run.piece)

    def _pack_run(self, pieces: Iterator[tuple[RunStart, EncodedDocuments]]) -> Iterator[tuple[Document, ...]]:
        """The bins of one run; stores the place after it in `_run`."""
        bin_len, seed = self._stream.options.bin_len, self._stream.options.seed
        run = self._run
        window, documents = OpenBins(bin_len, _OPEN_BINS), dict[int, Document]()
        index = num_tokens = 0
        while num_tokens < RUN_BINS * bin_len:
            after, encoded = next(pieces)
            self._run = after
            for document in _documents(encoded, self._row_order(after, encoded)):
                documents[index] = document
                length = len(document.input_ids)
                num_tokens += length
                for _, members in window.add(index, length):
                    yield tuple(documents.pop(member) for member in members)
                index += 1
        rest = [member for _, members in window.flush() for member in members]
        lengths = np.array([len(documents[member].input_ids) for member in rest], dtype=np.int64)
        bins = best_fit_decreasing(lengths, bin_len)
        # Best-fit decreasing sorts by length; training should not see that order.
        order = permutation(len(bins), "rest", seed, self._lane, run.first_bin, run.block, run.piece)
        for position in order:
            yield tuple(documents[rest[member]] for member in bins[position])

    def _row_order(self, after: RunStart, encoded: EncodedDocuments) -> np.ndarray:
        num, options = len(encoded.lengths), self._stream.options
        if not options.shuffle:
            return np.arange(num)
        return permutation(num, "rows", options.seed, self._lane, after.block, after.piece)

    def _pieces(self) -> Iterator[tuple[RunStart, EncodedDocuments]]:
        """The encoded pieces from `_run` on, each with the place after it."""
        block, skip = self._run.block, self._run.piece
        from_beginning = block == skip == 0
        num_empty = 0
        while True:
            _, index, number = self._order.block(self._lane, block)
            entry = self._stream.entries[index]
            file, inner = self._tables[index][number]
            num_documents = 0
            for piece_number, piece in enumerate(block_pieces(file, inner, entry.form.selected, entry.option)):
                if piece_number < skip:
                    continue
                encoded = entry.form.encode(piece)
                self._judge(index, encoded, piece)
                num_documents += len(encoded.lengths)
                yield RunStart(0, block, piece_number + 1), encoded
            # A resume at the end of a block skips the whole block and continues with the next.
            num_empty = 0 if num_documents or skip else num_empty + 1
            if num_empty > self._order.blocks_per_cycle:
                raise DataError(f"{entry.option}: nothing is left of the stream: a whole epoch of it has no document")
            block, skip = block + 1, 0
            if from_beginning and self._order.num_lanes == 1 and block == self._order.blocks_per_cycle:
                self._judge_all()

    def _judge(self, index: int, encoded: EncodedDocuments, piece: Piece) -> None:
        judge, entry = self._judges[index], self._stream.entries[index]
        if not encoded.counts.samples:
            return
        if judge.labelled not in (None, encoded.has_labels):
            raise DataError(
                f"{piece.place(0)}: the rows from here on have {'' if encoded.has_labels else 'no '}labels, unlike "
                f"those before them; give every row of {entry.name} labels (-100 where a token is not trained), or none"
            )
        judge.labelled = encoded.has_labels
        check_ids(encoded, piece, entry.form)
        self._read.append((index, encoded.counts))
        judge.counts += encoded.counts
        if judge.counts.samples >= judge.next_at:
            judge.next_at *= 10
            judge_counts(judge.counts, entry.name, entry.form, entry.option, entry.allowed, stops=True)

    def _judge_all(self) -> None:
        """Judges a small dataset that was read completely: in one lane, after the first epoch."""
        for judge, entry in zip(self._judges, self._stream.entries, strict=True):
            judge_counts(judge.counts, entry.name, entry.form, entry.option, entry.allowed, stops=True)


@dataclass
class _Judge:
    """The counts so far of an entry's samples."""

    counts: Counts = field(default_factory=Counts)
    next_at: int = _FIRST_JUDGED
    labelled: bool | None = None


def _documents(encoded: EncodedDocuments, order: np.ndarray) -> Iterator[Document]:
    ends = np.cumsum(encoded.lengths)
    labels = encoded.input_ids if encoded.labels is None else encoded.labels
    for index in order:
        span = slice(int(ends[index] - encoded.lengths[index]), int(ends[index]))
        extras = {name: values[span] for name, values in encoded.extras.items()}
        yield Document(encoded.input_ids[span], labels[span], extras)
