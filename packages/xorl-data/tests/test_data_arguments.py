"""Wrong arguments at public doors: each is refused and named. Paths may be text."""

from collections.abc import Callable
from pathlib import Path

import pytest

from xorl.data import DataPlan, DatasetEntry, PrepareOptions, StepLoader, pack, prepare
from xorl.data.batch import collate, padding_batch
from xorl.data.stream import StreamLoader, StreamOptions, StreamPlan, open_stream

LINE = '{"input_ids": [1, 2, 3]}\n'


def loader(**options: int) -> StepLoader:
    documents = prepare([DatasetEntry("dummy")], PrepareOptions(bin_len=32, vocab_size=50, dummy_documents=8))
    bins = pack(documents.lengths, bin_len=32)
    return StepLoader(documents, bins, DataPlan.one_pass(documents, bins, bins_per_step=1), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack([3, 70], bin_len=64), "lengths: document 1 has 70 tokens"),
        (lambda: pack([3], bin_len=64, method="greedy"), "method: 'greedy' is not one of sequential, multipack, none"),
        (lambda: pack([3], bin_len=64, group_size=0), "group_size: 0, want at least 1"),
        (lambda: loader(micro_batch_size=0), "micro_batch_size: 0, want at least 1"),
        (lambda: loader(micro_batch_size=1, dp_rank=2, dp_size=2), "dp_rank: 2 is not from 0"),
        (lambda: loader(micro_batch_size=1, pad_to_multiple_of=0), "pad_to_multiple_of: 0, want at least 1"),
        (lambda: next(loader(micro_batch_size=1).steps(start=-1)), "start: -1 is not from 0"),
        (lambda: collate([], pad_to_multiple_of=0), "pad_to_multiple_of: 0"),
        (lambda: padding_batch(0), "length: a padding batch needs"),
        (lambda: StreamOptions(bin_len=0), "bin_len: 0, want at least 1"),
        (lambda: prepare([], PrepareOptions(bin_len=8)), "entries is empty"),
        (lambda: prepare([DatasetEntry("dummy")], PrepareOptions(bin_len=0)), "bin_len: 0, want at least 1"),
        (
            lambda: prepare([DatasetEntry("dummy", type="tokens")], PrepareOptions(bin_len=8, vocab_size=9)),
            r"entries\[0\].type: 'tokens' is not one of",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(call: Callable[[], object], message: str) -> None:
    # Catches an AssertionError or ZeroDivisionError from inside, and options of a command that is not installed.
    with pytest.raises(ValueError, match=message):
        call()


def test_a_stream_refuses_batches_and_positions_that_do_not_fit(tmp_path: Path) -> None:
    # Catches an AssertionError, and positions of another stream spread over all lanes.
    (tmp_path / "rows.jsonl").write_text(LINE * 50)
    entries = [DatasetEntry(str(tmp_path / "rows.jsonl"))]
    stream = open_stream(entries, StreamOptions(bin_len=8), index_path=str(tmp_path / "index"))
    plan = StreamPlan.over(stream, bins_per_step=4, max_steps=1)
    with pytest.raises(ValueError, match="micro_batch_size: 3 times dp_size 1 does not divide"):
        StreamLoader(stream, plan, micro_batch_size=3)
    other = open_stream(entries, StreamOptions(bin_len=8, seed=1), index_path=str(tmp_path / "index"))
    with pytest.raises(ValueError, match="plan: it belongs to another stream"):
        StreamLoader(other, plan, micro_batch_size=1)
    loader = StreamLoader(other, StreamPlan.over(other, bins_per_step=4, max_steps=1), micro_batch_size=1)
    mark = list(plan.bins_hash)
    for positions, message in (
        ([[1, 2]] * (plan.num_lanes + 2), r"positions: want \[2, 2\] integers .* got \[3, 2\]"),
        ([[1.5, 2], mark], r"positions: want \[2, 2\] integers .* of float64"),
        (loader.positions(), "positions: they belong to a stream of other data .* seed"),
        ([[-1, -1], mark], r"positions: \[-1, -1\] of lane 0 is not the start of a run"),
        ([[1000, 0], mark], r"positions: \[1000, 0\] of lane 0 is not the start"),
        ([[0, 5], mark], r"positions: \[0, 5\] of lane 0 is not the start"),
        ([[10**9, 5], mark], "positions: they were taken after the first bin of step 1, .* its bin 1000000000"),
    ):
        with pytest.raises(ValueError, match=message):
            next(StreamLoader(stream, plan, micro_batch_size=1, positions=positions).steps(start=1))


def test_paths_may_be_text(tmp_path: Path) -> None:
    # Catches "unsupported operand type(s) for /: 'str' and 'str'".
    (tmp_path / "rows.jsonl").write_text(LINE)
    options = PrepareOptions(bin_len=8, prepared_path=str(tmp_path / "prepared"))
    assert len(prepare([DatasetEntry(str(tmp_path / "rows.jsonl"))], options)) == 1
