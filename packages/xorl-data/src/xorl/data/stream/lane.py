"""Reads the blocks of one lane of a stream, encodes documents and packs bins, deterministically, from any run on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from xorl.data.batch import Document
from xorl.data.chunks import Chunk
from xorl.data.errors import DataError
from xorl.data.formats import EncodedDocuments
from xorl.data.hashing import permutation
from xorl.data.invariants import check_ids, check_skipped, validate_counts
from xorl.data.packing import OpenBins, best_fit_decreasing
from xorl.data.receipt import Counts
from xorl.data.stream.files import BlockTable, Stream
from xorl.data.stream.order import RUN_BINS, StreamOrder
from xorl.data.stream.reading import block_chunks

# Fewer open bins than for prepared data, because every lane keeps the documents of its open bins in memory.
_OPEN_BINS = 32
# Counts are checked after this many samples, when they become meaningful, then after each tenfold number.
_FIRST_CHECK_SAMPLES = 1000
# The number of skipped rows of an entry that each lane names in the log.
_NUM_NAMED = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunStart:
    """The start of a run in a lane: the lane's number of its first bin, and the next block and chunk to read."""

    first_bin: int = 0
    block: int = 0
    chunk: int = 0


@dataclass(frozen=True)
class StreamBin:
    """A packed bin: its documents, its number in its lane, and the start of its run.

    `read` has (entry, counts) of each chunk read since the lane's previous bin. It depends only on the bin, so the sum
    over all bins does not depend on which rank gets which bin.
    """

    lane: int
    number: int
    run: RunStart
    documents: tuple[Document, ...]
    read: tuple[tuple[int, Counts], ...] = ()


class StreamLane:
    """The endless sequence of bins of lane `lane`, beginning with the run `start`."""

    def __init__(self, stream: Stream, order: StreamOrder, lane: int, start: RunStart | None = None) -> None:
        self._stream = stream
        self._lane = lane
        self._order = order
        self._tables = [BlockTable(entry) for entry in stream.entries]
        self._progress = [_EntryProgress() for _ in stream.entries]
        self._run = start or RunStart()
        self._read: list[tuple[int, Counts]] = []

    def bins(self) -> Iterator[StreamBin]:
        """Yields bins. Raises DataError if data cannot be read, or if a whole epoch has no documents."""
        chunks = self._chunks()
        while True:
            run, number = self._run, self._run.first_bin
            for members in self._pack_run(chunks):
                read, self._read = tuple(self._read), []
                yield StreamBin(self._lane, number, run, members, read)
                number += 1
            self._run = RunStart(number, self._run.block, self._run.chunk)

    def _pack_run(self, chunks: Iterator[tuple[RunStart, EncodedDocuments]]) -> Iterator[tuple[Document, ...]]:
        """Yields the bins of one run, and sets `_run` to the end of the run."""
        bin_len, seed = self._stream.options.bin_len, self._stream.options.seed
        run = self._run
        window, documents = OpenBins(bin_len, _OPEN_BINS), dict[int, Document]()
        index = num_tokens = 0
        while num_tokens < RUN_BINS * bin_len:
            after, encoded = next(chunks)
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
        # Best-fit decreasing sorts by length, so the bins are shuffled.
        order = permutation(len(bins), "rest", seed, self._lane, run.first_bin, run.block, run.chunk)
        for index in order:
            yield tuple(documents[rest[member]] for member in bins[index])

    def _row_order(self, after: RunStart, encoded: EncodedDocuments) -> np.ndarray:
        num, options = len(encoded.lengths), self._stream.options
        if not options.shuffle:
            return np.arange(num)
        return permutation(num, "rows", options.seed, self._lane, after.block, after.chunk)

    def _chunks(self) -> Iterator[tuple[RunStart, EncodedDocuments]]:
        """Yields the encoded chunks from `_run` on, each with the position after it."""
        block, skip = self._run.block, self._run.chunk
        from_beginning = block == skip == 0
        num_empty = 0
        while True:
            index, number = self._order.block(self._lane, block)
            entry = self._stream.entries[index]
            file, inner = self._tables[index][number]
            num_documents = 0
            for chunk_number, chunk in enumerate(block_chunks(file, inner, entry.format.selected, entry.option)):
                if chunk_number < skip:
                    continue
                encoded = entry.format.encode(chunk)
                self._check(index, encoded, chunk)
                num_documents += len(encoded.lengths)
                yield RunStart(0, block, chunk_number + 1), encoded
            # `skip` may cover the whole block, if a run ended with its last chunk: then the block is not empty.
            num_empty = 0 if num_documents or skip else num_empty + 1
            if num_empty > self._order.blocks_per_cycle:
                raise DataError(f"{entry.option}: the stream has no documents in a whole epoch")
            block, skip = block + 1, 0
            if from_beginning and self._order.num_lanes == 1 and block == self._order.blocks_per_cycle:
                self._check_epoch()

    def _check(self, index: int, encoded: EncodedDocuments, chunk: Chunk) -> None:
        progress, entry = self._progress[index], self._stream.entries[index]
        self._warn_of_skipped(index, encoded)
        if encoded.counts.samples == encoded.counts.skipped:
            self._count(index, encoded)
            return
        if progress.labelled not in (None, encoded.has_labels):
            raise DataError(
                f"{chunk.location(0)}: the rows from here on have {'' if encoded.has_labels else 'no '}labels, unlike "
                f"the rows before; give every row of {entry.name} labels (-100 where a token is not trained), or none"
            )
        progress.labelled = encoded.has_labels
        check_ids(encoded, chunk, entry.format)
        self._count(index, encoded)

    def _warn_of_skipped(self, index: int, encoded: EncodedDocuments) -> None:
        entry, num_before = self._stream.entries[index], self._progress[index].counts.skipped
        for problem in encoded.findings.problems[: max(0, _NUM_NAMED - num_before)]:
            logger.warning("stream dataset=%s skipped: %s", entry.name, problem)

    def _count(self, index: int, encoded: EncodedDocuments) -> None:
        progress, entry = self._progress[index], self._stream.entries[index]
        self._read.append((index, encoded.counts))
        progress.counts += encoded.counts
        if encoded.counts.skipped and progress.counts.samples >= _FIRST_CHECK_SAMPLES:
            check_skipped(progress.counts, entry.name, entry.option, entry.limits)
        if progress.counts.samples >= progress.next_check_at:
            progress.next_check_at *= 10
            validate_counts(progress.counts, entry.name, entry.format, entry.option, entry.limits, strict=True)

    def _check_epoch(self) -> None:
        """Checks the counts of the first epoch; only a dataset in a single lane has all of them here."""
        for progress, entry in zip(self._progress, self._stream.entries, strict=True):
            validate_counts(progress.counts, entry.name, entry.format, entry.option, entry.limits, strict=True)


@dataclass
class _EntryProgress:
    """The counts of the samples that a lane has read from an entry, and when to check them next."""

    counts: Counts = field(default_factory=Counts)
    next_check_at: int = _FIRST_CHECK_SAMPLES
    labelled: bool | None = None


def _documents(encoded: EncodedDocuments, order: np.ndarray) -> Iterator[Document]:
    ends = np.cumsum(encoded.lengths)
    labels = encoded.input_ids if encoded.labels is None else encoded.labels
    for index in order:
        span = slice(int(ends[index] - encoded.lengths[index]), int(ends[index]))
        extras = {name: values[span] for name, values in encoded.extras.items()}
        yield Document(encoded.input_ids[span], labels[span], extras)
