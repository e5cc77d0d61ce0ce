"""What holds for all data: packing splits and loses nothing, and the order knows nothing of ranks, workers or stops."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xorl.data import DataPlan, DatasetEntry, StepLoader, pack
from xorl.data.mixture import Share, drawn_rows, num_drawn
from xorl.data.packing import OpenBins, PackingMethod
from xorl.data.plan import fingerprint_of
from xorl.data.stream import Stream, StreamLoader, StreamOptions, StreamPlan, files, lane, open_stream, order

BIN_LEN = 64
LENGTHS = st.lists(st.integers(1, BIN_LEN), min_size=1, max_size=300)
WORLDS = st.sampled_from([1, 2, 4, 8])


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    method=st.sampled_from(["sequential", "multipack", "none"]),
    strict=st.booleans(),
    group_size=st.integers(1, 100),
    seed=st.integers(0, 9),
)
def test_packing_puts_every_document_whole_into_one_bin(
    lengths: list[int], method: PackingMethod, strict: bool, group_size: int, seed: int
) -> None:
    # Catches documents that are lost, doubled or cut, bins that overflow, and packing that is not repeatable.
    arguments = {"bin_len": BIN_LEN, "method": method, "strict_order": strict, "group_size": group_size, "seed": seed}
    bins = pack(lengths, **arguments)
    assert sorted(bins.indices.tolist()) == list(range(len(lengths)))
    totals = [sum(lengths[index] for index in bins.documents(number)) for number in range(len(bins))]
    assert sum(totals) == sum(lengths) == bins.num_tokens
    assert max(totals) <= BIN_LEN
    assert min(totals) >= 1
    assert pack(lengths, **arguments).digest == bins.digest


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, num_open=st.integers(1, 8))
def test_online_packing_never_holds_more_than_its_window(lengths: list[int], num_open: int) -> None:
    # Catches an open bin that never leaves, and documents that leave twice.
    window = OpenBins(BIN_LEN, num_open)
    left: list[tuple[int, list[int]]] = []
    for index, length in enumerate(lengths):
        left += window.add(index, length)
        assert index + 1 - sum(len(members) for _, members in left) <= num_open * BIN_LEN
    rest = window.flush()
    assert len(rest) <= num_open
    assert sorted(member for _, members in left + rest for member in members) == list(range(len(lengths)))
    assert all(sum(lengths[member] for member in members) <= BIN_LEN for _, members in left + rest)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
    seed=st.integers(0, 9),
)
def test_mixtures_take_every_document_equally_often(sizes: list[int], weights: list[float], seed: int) -> None:
    # Catches shares that do not add up, and documents that a draw repeats while it misses others.
    drawn = num_drawn(sizes, [Share(weight=weight) for weight in weights[: len(sizes)]])
    assert sum(sizes) <= sum(drawn) <= sum(sizes) + len(sizes)
    for size, num in zip(sizes, drawn, strict=True):
        times = np.bincount(drawn_rows(size, num, seed), minlength=size)
        assert times.sum() == num
        assert times.max() - times.min() <= 1


class Documents:
    """Documents of given lengths, each of its own id alone."""

    extra_names: tuple[str, ...] = ()

    fingerprint = "content"

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        ids = np.full(self.lengths[index], index, dtype=np.int32)
        return ids, ids

    def extras(self, index: int) -> dict[str, np.ndarray]:
        return {}


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, BIN_LEN), min_size=80, max_size=200),
    seed=st.integers(0, 9),
    stops=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    worlds=st.lists(WORLDS, min_size=1, max_size=4),
    num_epochs=st.integers(1, 3),
)
def test_a_prepared_run_goes_on_in_the_same_order(
    lengths: list[int], seed: int, stops: list[int], worlds: list[int], num_epochs: int
) -> None:
    # Catches a place in the data, or an order, that depends on how often and on what a run was started.
    documents, bins = Documents(lengths), pack(lengths, bin_len=BIN_LEN)

    def plan() -> DataPlan:
        return DataPlan(
            len(bins), 8, fingerprint_of(documents, bins), seed=seed, num_epochs=num_epochs, drop_last=False
        )

    expected = [sorted(i for b in plan().bins_of_step(k) for i in bins.documents(b)) for k in range(plan().num_steps)]
    per_epoch = plan().steps_per_epoch
    assert all(
        sorted(i for step in expected[at : at + per_epoch] for i in step) == list(range(len(lengths)))
        for at in range(0, len(expected), per_epoch)
    )
    found: list[list[int]] = []
    cuts = [0, *sorted({stop for stop in stops if stop < len(expected)}), len(expected)]
    for number, (start, stop) in enumerate(pairwise(cuts)):
        world = worlds[number % len(worlds)]
        loaders = [
            StepLoader(documents, bins, plan(), micro_batch_size=1, dp_rank=rank, dp_size=world).steps(start)
            for rank in range(world)
        ]
        for _ in range(start, stop):
            batches = [batch for loader in loaders for batch in next(loader)[1] if batch.num_tokens]
            found.append(sorted({int(batch.input_ids[at]) for batch in batches for at in batch.cu_seqlens[:-1]}))
    assert found == expected


@contextmanager
def stream_over(lengths: list[int], seed: int) -> Iterator[Stream]:
    """A stream of documents, each of its own number alone, in small blocks and runs."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(order, _RUNS_PER_LANE=1, RUN_BINS=3):
        path = Path(folder, "rows.jsonl")
        path.write_text("".join(json.dumps({"input_ids": [i] * n}) + "\n" for i, n in enumerate(lengths)))
        with mock.patch.object(files, "BLOCK_BYTES", 700), mock.patch.object(lane, "RUN_BINS", 3):
            options = StreamOptions(BIN_LEN, vocab_size=1000, seed=seed)
            yield open_stream([DatasetEntry(str(path))], options, index_path=Path(folder))


def read(
    stream: Stream, world: int, positions: np.ndarray | None, start: int, stop: int
) -> tuple[list[list[list[int]]], np.ndarray]:
    """The documents of each bin of each step from `start` to `stop`, in global order, and what a checkpoint keeps."""
    plan = StreamPlan.over(stream, bins_per_step=8, max_steps=stop)
    saved = None if positions is None else positions.tolist()
    ranks = [
        StreamLoader(stream, plan, micro_batch_size=1, dp_rank=rank, dp_size=world, positions=saved)
        for rank in range(world)
    ]
    iterators = [rank.steps(start) for rank in ranks]
    steps = []
    for _ in range(start, stop):
        dealt = zip(*(next(iterator)[1] for iterator in iterators), strict=True)
        steps.append(
            [batch.input_ids[batch.cu_seqlens[:-1].long()].tolist() for together in dealt for batch in together]
        )
    return steps, np.maximum.reduce([rank.positions() for rank in ranks])


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(2, BIN_LEN), min_size=60, max_size=150),
    seed=st.integers(0, 9),
    stops=st.lists(st.integers(1, 11), min_size=1, max_size=6),
    worlds=st.lists(WORLDS, min_size=1, max_size=4),
)
def test_a_stream_goes_on_in_the_same_order(lengths: list[int], seed: int, stops: list[int], worlds: list[int]) -> None:
    # Catches bins that depend on ranks or on where a run was stopped, documents cut or doubled, and bins that overflow.
    with stream_over(lengths, seed) as stream:
        expected, _ = read(stream, 1, None, 0, 12)
        for members in (members for step in expected for members in step):
            assert sum(lengths[document] for document in members) <= BIN_LEN
        cuts = [0, *sorted(set(stops)), 12]
        found, positions = [], None
        for number, (start, stop) in enumerate(pairwise(cuts)):
            part, positions = read(stream, worlds[number % len(worlds)], positions, start, stop)
            found += part
        assert found == expected


@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_a_stream_repeats_little_data_evenly(num_rows: int) -> None:
    # Catches epochs that run far ahead of each other where there is less data than lanes would like.
    with stream_over([20] * num_rows, seed=1) as stream:
        steps, _ = read(stream, 2, None, 0, 12)
    times = np.bincount([document for step in steps for members in step for document in members], minlength=num_rows)
    assert times.min() > 0
    assert times.max() <= 2 * times.min() + 2
