"""StreamPlan and StreamLoader: the micro-batches of a stream, step by step, for one rank, starting at any step.

Bin k belongs to step k // bins_per_step and, within it, to rank k % dp_size. So the step is the position in the data.
The start of each lane's current run is saved too, so that a resume reads only that run again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import count, islice

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from xorl.data.arguments import check_at_least, checked
from xorl.data.batch import Column, PackedBatch, collate
from xorl.data.errors import DataError
from xorl.data.hashing import digest
from xorl.data.packing import StartMethod
from xorl.data.plan import check_loading, check_start
from xorl.data.receipt import Counts, DatasetReceipt, Findings, Receipt
from xorl.data.stream.files import Stream
from xorl.data.stream.lane import RunStart, StreamBin, StreamLane
from xorl.data.stream.order import StreamOrder
from xorl.data.workers import iterate

logger = logging.getLogger(__name__)

# A run's start is saved as two integers that increase together: its first bin, and block and chunk combined.
_CHUNK_BITS = 24
_NUM_COUNTS = len(fields(Counts))
Positions = np.ndarray | Sequence[Sequence[int]]


@dataclass(frozen=True)
class StreamPlan:
    """The division of a stream into `num_steps` optimizer steps of `bins_per_step` bins. A stream has no epochs."""

    fingerprint: str
    num_lanes: int
    seed: int
    shuffle: bool
    bins_per_step: int
    num_steps: int
    steps_per_epoch: int = 0
    num_bins: int = 0

    @classmethod
    @checked
    def over(cls, stream: Stream, *, bins_per_step: int, max_steps: int) -> StreamPlan:
        """The plan over `stream`."""
        check_at_least(1, bins_per_step=bins_per_step, max_steps=max_steps)
        options = stream.options
        lanes = StreamOrder(stream).num_lanes
        return cls(stream.fingerprint, lanes, options.seed, options.shuffle, bins_per_step, max_steps)

    @property
    def hash(self) -> str:
        """Identifies the order: plans with equal hashes have the same documents at every step that both have."""
        return digest("stream plan", *self._order, self.bins_per_step)

    @property
    def bins_hash(self) -> tuple[int, int]:
        """Identifies the sequence of bins, regardless of steps, as two integers of 63 bits."""
        number = int(digest("stream bins", *self._order), 16)
        return number >> 65, number & ((1 << 63) - 1)

    @property
    def _order(self) -> tuple[str, int, int, bool]:
        # Without `shuffle` too, the seed draws blocks for fractions of epochs and orders the last bins of each run.
        return self.fingerprint, self.num_lanes, self.seed, self.shuffle


class StreamTally:
    """Counts over the bins that were returned to training.

    A sample is counted with the first bin that its lane completes after reading it, on the rank that gets that bin. So
    it counts once per epoch, for any number of ranks and workers and across resumes. Samples whose documents are still
    in open bins are counted; samples that were only prefetched, or that a resume reads again, are not.

    `saved` are the `values` of an earlier tally. Raises DataError for those of another number of entries.
    """

    @checked
    def __init__(self, stream: Stream, saved: Sequence[int] | None = None) -> None:
        self._stream = stream
        # The counts of each entry, then the number of bins and the number of tokens in them.
        self.values = np.zeros(len(stream.entries) * _NUM_COUNTS + 2, dtype=np.int64)
        if saved is not None:
            counts = _with_all_counts(np.asarray(saved), len(stream.entries))
            if counts.shape != self.values.shape or counts.dtype.kind not in "iu":
                raise DataError(f"saved: {counts.dtype} {list(counts.shape)}, want {len(self.values)} integers")
            self.values[:] = counts

    def add(self, member: StreamBin) -> None:
        """Adds a bin and the counts of the chunks read for it."""
        for entry, counts in member.read:
            self.values[entry * _NUM_COUNTS : (entry + 1) * _NUM_COUNTS] += np.array(astuple(counts))
        self.values[-2:] += 1, sum(len(document.input_ids) for document in member.documents)

    def receipt(self, plan_hash: str | None) -> Receipt:
        """The counts as a receipt; `plan_hash` (StreamPlan.hash) identifies the stream and its order."""
        values = self.values.tolist()
        findings = self._stream.findings or [Findings()] * len(self._stream.entries)
        datasets = [
            DatasetReceipt(entry.name, Counts(*values[index * _NUM_COUNTS : (index + 1) * _NUM_COUNTS]), findings=found)
            for index, (entry, found) in enumerate(zip(self._stream.entries, findings, strict=True))
        ]
        num_bins, num_tokens = values[-2:]
        fill = num_tokens / (max(1, num_bins) * self._stream.options.bin_len)
        return Receipt(tuple(datasets)).with_bins(
            num_bins=num_bins, fill=fill, plan_hash=plan_hash, packed={"tokens": num_tokens}
        )


def _with_all_counts(saved: np.ndarray, num_entries: int) -> np.ndarray:
    """The values of a tally from an earlier version with fewer counts; counts added since are 0."""
    num_saved = (len(saved) - 2) // num_entries if saved.ndim == 1 else 0
    if not 0 < num_saved < _NUM_COUNTS or len(saved) != num_saved * num_entries + 2:
        return saved
    counts = saved[:-2].reshape(num_entries, num_saved)
    return np.concatenate([np.pad(counts, ((0, 0), (0, _NUM_COUNTS - num_saved))).ravel(), saved[-2:]])


class StreamLoader:
    """The micro-batches of rank `dp_rank` of `dp_size`, step by step.

    `positions` (see `positions()`) come from a checkpoint with any number of ranks and workers; without them, starting
    at a later step reads all data before it. Workers must not share lanes, so their number is lowered to a divisor of
    this rank's number of lanes. `tally` counts the returned bins.

    Raises ValueError for a plan or positions of another stream, and, in `steps`, for positions after `start`.
    """

    @checked
    def __init__(
        self,
        stream: Stream,
        plan: StreamPlan,
        *,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        pad_to_multiple_of: int = 1,
        num_workers: int = 0,
        prefetch_factor: int | None = 2,
        pin_memory: bool = False,
        worker_start_method: StartMethod | None = None,
        positions: Positions | None = None,
    ) -> None:
        check_loading(dp_rank, dp_size, micro_batch_size, pad_to_multiple_of, num_workers, prefetch_factor)
        options = stream.options
        if (plan.fingerprint, plan.seed, plan.shuffle) != (stream.fingerprint, options.seed, options.shuffle):
            raise ValueError(
                "plan: it belongs to another stream, or to one with another seed; use StreamPlan.over(stream)"
            )
        per_round = micro_batch_size * dp_size
        if plan.bins_per_step % per_round:
            raise ValueError(
                f"micro_batch_size: {micro_batch_size} times dp_size {dp_size} does not divide the plan's "
                f"{plan.bins_per_step} bins_per_step"
            )
        self._stream = stream
        self._plan = plan
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._pad_to_multiple_of = pad_to_multiple_of
        self._columns = {name: Column() for name in stream.extra_names}
        self._num_workers = _useful_workers(num_workers, plan.num_lanes // math.gcd(plan.num_lanes, dp_size))
        self._prefetch_factor = (prefetch_factor or 2) * micro_batch_size
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self._start_method: StartMethod | None = worker_start_method
        self._first_runs = _runs_of(positions, plan)
        self._runs = self._first_runs.copy()
        self.tally = StreamTally(stream)

    @property
    def num_steps(self) -> int:
        return self._plan.num_steps

    @property
    def plan(self) -> StreamPlan:
        return self._plan

    def positions(self) -> np.ndarray:
        """[L + 1, 2] int64, for a resume after the last returned step: a row for each of the L lanes, and bins_hash.

        The row of a lane is the start of the run of its last returned bin: the number of the run's first bin in the
        lane, and the place in the data at which the run begins. Each rank has the state of its own lanes; the
        elementwise maximum over all ranks has the state of all.
        """
        return np.concatenate([self._runs, [self._plan.bins_hash]])

    @checked
    def steps(self, start: int = 0) -> Iterator[tuple[int, list[PackedBatch]]]:
        """Yields (step, its micro-batches), beginning with step `start`."""
        check_start(start, self.num_steps)
        if self._lane_after(start) is not None:  # this loader itself has gone further
            self._runs = self._first_runs.copy()
        lane = self._lane_after(start)
        if lane is not None:
            raise ValueError(
                f"positions: they were taken after the first bin of step {start}, the start: lane {lane} is in the run "
                f"that begins with its bin {self._runs[lane, 0]}; start at the step after which they were taken, or "
                "leave them out"
            )
        per_step = self._plan.bins_per_step // self._dp_size
        runs = [RunStart(first, *divmod(position, 1 << _CHUNK_BITS)) for first, position in self._runs.tolist()]
        dataset = _RankBins(
            self._stream,
            first=start * self._plan.bins_per_step + self._dp_rank,
            stride=self._dp_size,
            num=(self.num_steps - start) * per_step,
            runs=runs,
        )
        bins = iterate(
            dataset,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_factor,
            start_method=self._start_method,
        )
        for step in range(start, self.num_steps):
            members = [next(bins) for _ in range(per_step)]
            for member in members:
                run = member.run
                self.tally.add(member)
                self._runs[member.lane] = run.first_bin, (run.block << _CHUNK_BITS) + run.chunk
            size = self._micro_batch_size
            yield step, [self._batch(members[index : index + size]) for index in range(0, per_step, size)]

    def _lane_after(self, start: int) -> int | None:
        """The first lane whose run does not begin before step `start`, and so does not lead to its bins."""
        first_bins = self._runs[:, 0] * len(self._runs) + np.arange(len(self._runs))
        after = np.flatnonzero((self._runs[:, 0] > 0) & (first_bins >= start * self._plan.bins_per_step))
        return int(after[0]) if len(after) else None

    def bins_of_micro_batches(self, step: int) -> list[np.ndarray]:
        """The bins of each of this rank's micro-batches in `step`, numbered as in `stream_bins`."""
        first = step * self._plan.bins_per_step + self._dp_rank
        bins = np.arange(first, (step + 1) * self._plan.bins_per_step, self._dp_size)
        return [bins[start : start + self._micro_batch_size] for start in range(0, len(bins), self._micro_batch_size)]

    def _batch(self, members: Sequence[StreamBin]) -> PackedBatch:
        documents = [document for member in members for document in member.documents]
        batch = collate(documents, pad_to_multiple_of=self._pad_to_multiple_of, columns=self._columns)
        return batch.pin_memory() if self._pin_memory else batch


def _runs_of(positions: Positions | None, plan: StreamPlan) -> np.ndarray:
    """The starts of the lanes' runs, [L, 2]."""
    runs = np.zeros((plan.num_lanes, 2), dtype=np.int64)
    if positions is None:
        return runs
    given = np.asarray(positions)
    shape = (plan.num_lanes + 1, 2)
    if given.shape != shape or given.dtype.kind != "i":
        raise ValueError(
            f"positions: want {list(shape)} integers from StreamLoader.positions(), a pair for each lane and one for "
            f"the stream; got {list(given.shape)} of {given.dtype}"
        )
    if tuple(given[-1].tolist()) != plan.bins_hash:
        raise ValueError(
            "positions: they belong to a stream of other data or options, or with another seed; open the same stream, "
            "or leave them out"
        )
    runs[:] = given[:-1]
    # Every run reads at least a chunk and has at least a bin, so both numbers of a pair are 0, or both are above.
    if len(wrong := np.flatnonzero((runs < 0).any(axis=1) | ((runs[:, 0] == 0) != (runs[:, 1] == 0)))):
        raise ValueError(
            f"positions: {runs[wrong[0]].tolist()} of lane {wrong[0]} is not the start of a run; pass them as "
            "StreamLoader.positions() returned them"
        )
    return runs


class _RankBins(IterableDataset[StreamBin]):
    """The `num` bins of a rank, `first` and every `stride`-th after it. Each worker takes every n-th of them."""

    def __init__(self, stream: Stream, *, first: int, stride: int, num: int, runs: list[RunStart]) -> None:
        self._stream = stream
        self._first = first
        self._stride = stride
        self._num = num
        self._runs = runs

    def __iter__(self) -> Iterator[StreamBin]:
        worker = get_worker_info()
        index, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        bins = stream_bins(
            self._stream,
            first=self._first + index * self._stride,
            stride=self._stride * num_workers,
            runs=self._runs,
        )
        return islice(bins, len(range(index, self._num, num_workers)))


def stream_bins(
    stream: Stream, *, first: int, stride: int, runs: Sequence[RunStart] | None = None
) -> Iterator[StreamBin]:
    """Yields bin `first` and every `stride`-th after it, endlessly. `runs` are the starts of the lanes, if not 0."""
    check_at_least(0, first=first)
    check_at_least(1, stride=stride)
    order, lanes = StreamOrder(stream), dict[int, Iterator[StreamBin]]()
    for position in count(first, stride):
        number, lane = divmod(position, order.num_lanes)
        if lane not in lanes:
            lanes[lane] = StreamLane(stream, order, lane, runs[lane] if runs else None).bins()
        # Skips bins of other ranks, and bins from before a resume.
        yield next(member for member in lanes[lane] if member.number == number)


def _useful_workers(num_workers: int, num_lanes: int) -> int:
    useful = max((num for num in range(1, num_workers + 1) if num_lanes % num == 0), default=0)
    if useful < num_workers:
        logger.info(
            "stream workers=%d of=%d: workers cannot share lanes, and this rank has %d", useful, num_workers, num_lanes
        )
    return useful
