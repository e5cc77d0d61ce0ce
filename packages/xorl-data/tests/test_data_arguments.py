"""Wrong arguments at public doors: each is refused and named. Paths may be text."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from xorl.data import DataPlan, DatasetEntry, PrepareOptions, StepLoader, pack, prepare, split_documents
from xorl.data.batch import collate, padding_batch
from xorl.data.documents import PreparedDocuments
from xorl.data.formats import ChatFormat, PromptCompletionFormat, TextTokenizer, TokenizedFormat
from xorl.data.inspect import text_segments
from xorl.data.packing import Bins
from xorl.data.plan import rescale_accumulation, split_step
from xorl.data.push import push_documents
from xorl.data.stream import StreamLoader, StreamOptions, StreamPlan, open_stream
from xorl.data.stream.loader import stream_bins

TOKENIZER = TextTokenizer(Path(), "", Tokenizer(models.BPE()), {}, frozenset(), {}, adds_bos=False)
LINE = '{"input_ids": [1, 2, 3]}\n'


def loader(**options: int) -> StepLoader:
    documents = prepare([DatasetEntry("dummy")], PrepareOptions(bin_len=32, vocab_size=50, dummy_documents=8))
    bins = pack(documents.lengths, bin_len=32)
    return StepLoader(documents, bins, DataPlan.one_pass(documents, bins, bins_per_step=1), **options)


def dummy(**options: object) -> PreparedDocuments:
    return prepare([DatasetEntry("dummy")], PrepareOptions(**{"bin_len": 32, "vocab_size": 50, **options}))


def entry(**fields: object) -> object:
    return prepare([DatasetEntry(**{"path": "dummy", **fields})], PrepareOptions(bin_len=32, vocab_size=50))


def stream(**fields: object) -> object:
    return open_stream([DatasetEntry("rows.jsonl", **fields)], StreamOptions(bin_len=64), index_path="x")


@pytest.mark.parametrize(
    ("call", "message"),
    [
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
        (lambda: prepare([DatasetEntry("x", data_files=[])], PrepareOptions(bin_len=8)), "data_files: is empty"),
        (lambda: entry(overflow_limit=2.0), "overflow_limit: 2.0 is not a fraction"),
        (lambda: split_step([1.0, np.nan], dp_size=1, micro_batch_size=1), "costs: .*, want a number of at least 0"),
        (lambda: prepare("x.jsonl", PrepareOptions(8)), "entries: 'x.jsonl' is str, want a list of DatasetEntry"),
        (lambda: prepare(["x.jsonl"], PrepareOptions(8)), r"entries\[0\]: 'x.jsonl' is str, want DatasetEntry"),
        (lambda: prepare(DatasetEntry("dummy"), PrepareOptions(8)), "entries: .* is DatasetEntry, want a list of"),
        (lambda: open_stream(["x"], StreamOptions(8), index_path="x"), r"entries\[0\]: 'x' is str, want DatasetEntry"),
        (lambda: entry(max_seq_len="64"), r"entries\[0\].max_seq_len: '64' is str, want int or None"),
        (lambda: entry(path=None), r"entries\[0\].path: None, want str"),
        (lambda: entry(columns="input_ids"), r"entries\[0\].columns: 'input_ids' is str, want a list of str or None"),
        (lambda: entry(columns=["input_ids", 5]), r"entries\[0\].columns\[1\]: 5 is int, want str"),
        (lambda: entry(column_names=["a"]), r"entries\[0\].column_names: \['a'\] is list, want Mapping"),
        (lambda: entry(weight="2"), r"entries\[0\].weight: '2' is str, want float or None"),
        (lambda: dummy(vocab_size="100"), "vocab_size: '100' is str, want int or None"),
        (lambda: dummy(bin_len=64.0), "bin_len: 64.0 is float, want int"),
        (lambda: dummy(bin_len="64"), "bin_len: '64' is str, want int"),
        (lambda: dummy(prepared_path=None), "prepared_path: None, want a path"),
        (lambda: dummy(seed="0"), "seed: '0' is str, want int"),
        (lambda: dummy(num_proc=0), "num_proc: 0, want at least 1"),
        (lambda: dummy(num_proc=True), "num_proc: True is bool, want int"),
        (lambda: split_documents(dummy(), 2, seed="0"), "seed: '0' is str, want int"),
        (lambda: StreamOptions(bin_len=64.0), "bin_len: 64.0 is float, want int"),
        (lambda: DataPlan(3, 1, "data", num_epochs=1.5), "num_epochs: 1.5 is float, want int"),
        (lambda: pack([1.5, 2.5], bin_len=64), "lengths: got float64 of shape .2., want .N. integers"),
        (lambda: pack(5, bin_len=64), "lengths: 5 is int, want ndarray or a list of int"),
        (lambda: pack([1], bin_len="64"), "bin_len: '64' is str, want int"),
        (lambda: pack([1], bin_len=64, strict_order="no"), "strict_order: 'no' is str, want bool"),
        (lambda: loader(micro_batch_size=1, num_workers=-1), "num_workers: -1, want at least 0"),
        (lambda: loader(micro_batch_size=1).steps(start="1"), "start: '1' is str, want int"),
        (lambda: stream(max_seq_len=100), r"entries\[0\].max_seq_len: 100, want 1 to 64, the bin length"),
        (lambda: stream(max_seq_len=0), r"entries\[0\].max_seq_len: 0, want 1 to 64"),
        (lambda: stream(max_seq_len=-1), r"entries\[0\].max_seq_len: -1, want 1 to 64"),
        (lambda: entry(shards=2, shards_idx=0), r"entries\[0\].shards: 2 has no effect on dummy"),
        (lambda: entry(split="test"), r"entries\[0\].split: 'test' has no effect on dummy"),
        (lambda: push_documents(dummy(), "a/b", "x", token=None, num_files=0), "num_files: 0, want at least 1"),
        (lambda: push_documents(dummy(), "a/b", "x", token=None, num_files=-1), "num_files: -1, want at least 1"),
        (lambda: push_documents(dummy(), "a/b", __file__, token=None), "prepared_path: .*py/pushed cannot be"),
        (lambda: dummy(model_special_ids={"eos_token": (3,)}), "model_special_ids: 'eos_token' is not one of bos, eos"),
        (lambda: dummy(model_special_ids={"eos": 3}), "model_special_ids: eos: 3, want a tuple of int"),
        (lambda: StreamOptions(8, model_special_ids={"eos": ("3",)}), r"model_special_ids: eos: \('3',\), want a tupl"),
        (lambda: TokenizedFormat(4, "cut", "x"), "overflow: 'cut' is not one of truncate, drop, "),
        (lambda: TokenizedFormat(4, "drop", "x", columns="input_ids"), "columns: 'input_ids' is str, want a list of"),
        (lambda: ChatFormat(4, "drop", "x", TOKENIZER, train_on="user"), "train_on: 'user' is not one of assistant, "),
        (
            lambda: PromptCompletionFormat(4, "drop", "x", TOKENIZER, train_on="answer"),
            "train_on: 'answer' is not one of completion, all",
        ),
        (lambda: next(stream_bins(None, first=-1, stride=1)), "first: -1, want at least 0"),
        (lambda: next(stream_bins(None, first=0, stride=0)), "stride: 0, want at least 1"),
        (lambda: next(stream_bins(None, first=0, stride=-1)), "stride: -1, want at least 1"),
        (lambda: rescale_accumulation(8, micro_batch_size=-2, dp_size=-2), "micro_batch_size: -2, want at least 1"),
        (lambda: rescale_accumulation(8, micro_batch_size=2, dp_size=0), "dp_size: 0, want at least 1"),
        (lambda: text_segments([1, 2], [1, 2], None), r"ids: \[1, 2\] is list, want ndarray"),
        (lambda: text_segments(np.arange(3), np.arange(2), None), r"labels: int64 \[2\], want integers \[3\]"),
        (lambda: text_segments(np.ones((1, 3), int), np.arange(3), None), r"ids: int64 \[1, 3\], want integers \[1\]"),
        (lambda: text_segments(np.ones(3), np.arange(3), None), r"ids: float64 \[3\], want integers \[3\]"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call: Callable[[], object], message: str) -> None:
    # Catches an AssertionError or ZeroDivisionError from inside, and options of a command that is not installed.
    with pytest.raises(ValueError, match=message):
        call()


def test_documents_bins_and_plans_that_do_not_belong_together_are_refused() -> None:
    # Catches training on other documents than the plan's, and an IndexError in the middle of it.
    documents, others, fewer = dummy(), dummy(seed=1), dummy(dummy_documents=20)
    bins, other_bins, fewer_bins = (pack(each.lengths, bin_len=64) for each in (documents, others, fewer))
    plan = DataPlan.over(documents, bins, bins_per_step=4)
    with pytest.raises(ValueError, match=r"bins: they hold 4096 documents of .* but documents has 20 of"):
        DataPlan.over(fewer, bins, bins_per_step=4)
    with pytest.raises(ValueError, match=r"bins: .* is DataPlan, want Bins"):
        StepLoader(documents, plan, bins, micro_batch_size=1)
    repacked = pack(documents.lengths, bin_len=64, method="none")
    for mismatched, message in (
        ((others, other_bins, plan), "plan: "),
        ((documents, repacked, plan), "plan: "),
        (
            (documents, Bins(bins.indices[::-1], bins.offsets, bins.num_tokens, 64), plan),
            "plan: it belongs to other doc",
        ),
        ((documents, fewer_bins, plan), "bins: they hold 20 documents"),
    ):
        with pytest.raises(ValueError, match=message):
            StepLoader(*mismatched, micro_batch_size=1)


def test_integers_of_numpy_are_integers() -> None:
    # Catches a refusal, or a failure of JSON, of a bin length or seed that was computed.
    options = {"bin_len": np.int64(32), "dummy_documents": np.int32(8), "seed": np.int64(3)}
    documents = dummy(**options)
    assert documents.fingerprint == dummy(**{name: int(value) for name, value in options.items()}).fingerprint
    bins = pack(documents.lengths, bin_len=np.int64(32), method="multipack", seed=np.int64(3))
    assert DataPlan.over(documents, bins, bins_per_step=np.int64(1)).bins_of_step(np.int64(0)).shape == (1,)


def test_a_stream_refuses_batches_and_positions_that_do_not_fit(tmp_path: Path) -> None:
    # Catches an AssertionError, and positions of another stream spread over all lanes.
    (tmp_path / "rows.jsonl").write_text(LINE * 50)
    entries = [DatasetEntry(str(tmp_path / "rows.jsonl"))]
    stream = open_stream(entries, StreamOptions(bin_len=8), index_path=str(tmp_path / "index"))
    plan = StreamPlan.over(stream, bins_per_step=4, max_steps=1)
    with pytest.raises(ValueError, match="max_steps: None, want int"):
        StreamPlan.over(stream, bins_per_step=4, max_steps=None)
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


def test_paths_may_be_text_and_names_paths(tmp_path: Path) -> None:
    # Catches "unsupported operand type(s) for /: 'str' and 'str'", and "argument of type 'PosixPath' is not iterable".
    (tmp_path / "rows.jsonl").write_text(LINE)
    options = PrepareOptions(bin_len=8, prepared_path=str(tmp_path / "prepared"))
    for path in (tmp_path / "rows.jsonl", str(tmp_path / "rows.jsonl")):
        assert len(prepare([DatasetEntry(path)], options)) == 1
    for files in (Path("rows.jsonl"), [Path("rows.jsonl")], (Path("rows.jsonl"),)):
        assert len(prepare([DatasetEntry(tmp_path, data_files=files)], options)) == 1


def test_a_file_that_several_patterns_match_is_read_once(tmp_path: Path) -> None:
    # Catches rows that count twice.
    (tmp_path / "rows.jsonl").write_text(LINE)
    options = PrepareOptions(bin_len=8, prepared_path=tmp_path / "prepared")
    assert len(prepare([DatasetEntry(tmp_path, data_files=["*.jsonl", "rows.jsonl"])], options)) == 1
