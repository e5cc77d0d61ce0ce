"""Bad input: each mistake is a DataError that names the place and what to do."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet
import pytest

from data_files import make_rows, write_jsonl
from xorl.data import DataError, DatasetEntry, prepare, split_documents

GOOD = '{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}'
LINES = {
    "not JSON": ('{"input_ids": [1, 2', r"is not JSON: .* at column \d+: '\{\"input_ids"),
    "words": ("hello", r"is not JSON: Expecting value at column 1: 'hello'"),
    "not an object": ("[1, 2]", r"is list, want one JSON object: '\[1, 2\]'"),
    "a nested key twice": ('{"input_ids": [{"a": 1, "a": 2}], "labels": [1]}', r"has the key 'a' twice"),
    "two objects": (GOOD + GOOD, r"is not JSON: Extra data"),
    "not UTF-8": (b'{"input_ids": "1 \xff", "labels": [1]}', r"is not UTF-8"),
    "other lengths": ('{"input_ids": [1, 2], "labels": [1]}', r"labels has 1 values and input_ids has 2"),
    "no ids": ('{"ids": [1], "labels": [1]}', r"column 'input_ids' does not exist; the columns are: ids, labels"),
    "null ids": ('{"input_ids": null, "labels": [1]}', r"column 'input_ids' is null"),
    "no labels": ('{"input_ids": [1, 2]}', r"the row has no labels, but other rows have them.*columns=.*input_ids"),
    "floats": ('{"input_ids": [1, 2.5], "labels": [1, 2]}', r"input_ids contains 2.5 \(float\), want .* integers"),
    "strings": ('{"input_ids": [1, "a"], "labels": [1, 2]}', r"input_ids contains 'a' \(str\)"),
    "text": ('{"text": "hello there"}', r"input_ids contains 'hello there' \(str\).* set the entry's type to text"),
    "booleans": ('{"input_ids": [1, true], "labels": [1, 2]}', r"input_ids contains True \(bool\)"),
    "nested": ('{"input_ids": [[1]], "labels": [1]}', r"input_ids contains \[1\] \(list\)"),
    "a number": ('{"input_ids": 5, "labels": [1]}', r"input_ids contains 5 \(int\)"),
    "beyond the vocabulary": ('{"input_ids": [1, 1000], "labels": [1, 2]}', r"input_ids contains the id 1000.* 1000,"),
    "label beyond": ('{"input_ids": [1, 2], "labels": [1, 1000]}', r"labels contains the id 1000"),
    "negative": ('{"input_ids": [1, -1], "labels": [1, 2]}', r"input_ids contains the negative id -1$"),
    "other mark": (
        '{"input_ids": [1, 2], "labels": [-1, 2]}',
        r"labels contains the negative id -1 \(mark labels .* -100",
    ),
    "huge": ('{"input_ids": [1, 99999999999999999999], "labels": [1, 2]}', r"input_ids contains a number that exceeds"),
    "mask": ('{"input_ids": [1], "labels": [1], "attention_mask": [2]}', r"attention_mask contains values other"),
}


@pytest.mark.parametrize(("line", "message"), LINES.values(), ids=LINES)
def test_a_bad_line_is_named(tmp_path, options, line, message):
    """Catches errors without file and line, and bad lines that pass."""
    path = tmp_path / "rows.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b"\n".join([GOOD.encode(), b"", line, GOOD.encode()]) + b"\n")
    with pytest.raises(DataError, match=message) as caught:
        prepare([DatasetEntry(path)], options)
    assert str(caught.value).startswith(f"{path}, line 3")
    assert not [child for child in options.prepared_path.glob("*") if child.is_dir()]


def test_a_bad_row_of_a_table_is_named(tmp_path, options):
    """Catches row numbers that start again with every batch."""
    table = pa.table({"input_ids": [[1, 2]] * 50, "labels": [[1, 2]] * 40 + [[1]] + [[1, 2]] * 9})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=8)
    with pytest.raises(DataError, match=r"rows.parquet, row 40 \(the first is 0\): labels has 1 values and .* has 2"):
        prepare([DatasetEntry(str(tmp_path / "rows.parquet"))], options)
    pyarrow.parquet.write_table(table.rename_columns(["ids", "labels"]), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="'input_ids' does not exist; the columns are: ids, labels"):
        prepare([DatasetEntry(str(tmp_path / "rows.parquet"))], options)


def test_a_missing_file_names_the_path_and_the_option(tmp_path, options):
    """Catches an error from deep inside that does not say which entry is wrong."""
    good = write_jsonl(tmp_path / "rows.jsonl", make_rows(3))
    with pytest.raises(DataError, match=r"entries\[1\].path: .*missing.jsonl does not exist"):
        prepare([DatasetEntry(str(good)), DatasetEntry(str(tmp_path / "missing.jsonl"))], options)
    with pytest.raises(DataError, match=r"data.test_datasets\[0\].path: /no/such/folder does not exist"):
        prepare([DatasetEntry("/no/such/folder")], options, option="data.test_datasets")


def test_files_that_are_not_what_they_say(tmp_path, options):
    """Catches a library's own exception type and message without the file's name."""
    for name, content in {
        "a.parquet": b"PAR1 no",
        "b.arrow": b"no arrow",
        "c.csv": b'input_ids,labels\n"1 2"\n',
        "d.jsonl.gz": b"no gzip",
        "e.json": b'[{"input_ids": [1, 2]}, {"input_ids": [3, 4] oops}]',
        "f.json": b'[{"input_ids": [1, 2]}, 5]',
        "g.json": b'[{"input_ids": [1, 2]}] {}',
        "h.json": b'[{"input_ids": [1, 2]},',
        "i.json": b'{\n "input_ids": [1, 2]\n}',
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DataError, match=str(path)):
            prepare([DatasetEntry(path)], options)


def test_an_id_beyond_the_vocabulary_is_found_in_the_cache_too(tmp_path, options):
    """Catches data prepared for one model that another model's smaller vocabulary cannot index."""
    rows = make_rows(20)
    rows[7]["input_ids"][0] = 999
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    prepare([DatasetEntry(path)], options)
    smaller = replace(options, vocab_size=999)
    with pytest.raises(DataError, match=rf"{path}, row 7 .* the id 999, but the model's vocab_size is 999"):
        prepare([DatasetEntry(path)], smaller)


def test_data_that_trains_nothing_stops(prepare_rows, tmp_path, options):
    """Catches the run whose loss reads 0.0 and that 'succeeds'."""
    masked = {"input_ids": [1, 2, 3], "labels": [1, -100, -100]}
    with pytest.raises(DataError, match=r"entries\[0\]: no token of .*rows.jsonl is trained: none of its 5 samples"):
        prepare_rows([masked] * 5)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"entries\[0\]: .*empty.jsonl is empty"):
        prepare([DatasetEntry(str(tmp_path / "empty.jsonl"))], options)
    with pytest.raises(DataError, match=r".* has no documents: of 5 samples 5 are longer than bin_len"):
        prepare_rows([{"input_ids": list(range(100))}] * 5, overflow="drop")


def test_more_than_one_percent_without_trained_tokens_stops_unless_explained(prepare_rows, caplog):
    """Catches a wrong mask on a part of the data, and a refusal of what the user asked for."""
    good = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}
    masked = {"input_ids": [1, 2, 3], "labels": [-100] * 3}
    assert prepare_rows([good] * 99 + [masked]).receipt.total.untrained == 1
    assert "untrained_samples=1" in caplog.text
    with pytest.raises(DataError, match=r"2 of the 100 samples .* have no trained token, more than 1%"):
        prepare_rows([good] * 98 + [masked] * 2)
    late = {"input_ids": list(range(70)), "labels": [-100] * 69 + [69]}
    cut = [good] * 90 + [late] * 10
    with pytest.raises(DataError, match=r"10 of them lost theirs when they were cut .*raise bin_len \(64\)"):
        prepare_rows(cut)
    assert prepare_rows(cut, max_seq_len=64).receipt.total.untrained_by_overflow == 10
    # The same documents are in the cache now, and still nobody set max_seq_len.
    with pytest.raises(DataError, match="lost theirs when they were cut"):
        prepare_rows(cut)


ENTRIES = [
    ({"type": "chats"}, r"\[0\].type: 'chats' is not one of tokenized, chat"),
    ({"ds_type": "xml"}, r"\[0\].ds_type: 'xml' is not one of json, csv"),
    ({"overflow": "cut"}, r"\[0\].overflow: 'cut' is not one of truncate"),
    ({"max_seq_len": 65}, r"\[0\].max_seq_len: 65, want 1 to 64, the bin length"),
    ({"max_seq_len": 0}, r"\[0\].max_seq_len: 0, want 1 to 64"),
    ({"shards": 2}, r"\[0\]: shards and shards_idx go together"),
    ({"shards": 2, "shards_idx": 2}, r"\[0\].shards_idx: 2 is not in 0..1"),
    ({"split": "validation"}, r"\[0\].split: files have no split 'validation'"),
    ({"revision": "main"}, r"\[0\].revision: 'main' applies only to Hub datasets"),
    ({"data_files": "x.jsonl"}, r"\[0\].data_files: path is the file"),
    ({"columns": ("labels",)}, r"columns: \['labels'\] does not include input_ids"),
    (
        {"columns": ("input_ids", "label")},
        r"line 1: column 'label' does not exist; the columns are: input_ids, labels \(",
    ),
    ({"path": "dummy"}, r"\[0\].path: dummy generates random token ids, so it needs the model's vocab_size"),
]


@pytest.mark.parametrize(("changes", "message"), ENTRIES, ids=[str(changes) for changes, _ in ENTRIES])
def test_an_entry_that_cannot_be_is_refused(tmp_path, options, changes, message):
    """Catches an option that is accepted and ignored."""
    path = write_jsonl(tmp_path / "rows.jsonl", make_rows(3))
    with pytest.raises(DataError, match=message):
        prepare([DatasetEntry(**{"path": path, **changes})], replace(options, vocab_size=None))


def test_options_that_cannot_be_are_refused(tmp_path, options):
    """Catches contradictions that would surface as a crash much later."""
    entry = DatasetEntry(str(write_jsonl(tmp_path / "rows.jsonl", make_rows(10))))
    for changes, message in (
        ({"dataset_shard_num": 2}, "set both dataset_shard_num and dataset_shard_idx"),
        ({"dataset_shard_num": 2, "dataset_shard_idx": 5}, "dataset_shard_idx: 5 is not in 0..1"),
        ({"dataset_shard_num": 20, "dataset_shard_idx": 19}, "leave shard 19 empty"),
        ({"prepared_path": tmp_path / "rows.jsonl"}, "prepared_path: .* cannot be created"),
    ):
        with pytest.raises(DataError, match=message):
            prepare([entry], replace(options, **changes))
    documents = prepare([entry], options)
    for size in (10, 0, -1, 1.5, 0.0, 1.0, True):
        with pytest.raises(DataError, match=r"val_set_size"):
            split_documents(documents, size, seed=0)


def test_a_selected_column_that_is_not_one_number_per_token_is_refused(prepare_rows):
    """Catches select_columns that keeps a column nobody can use."""
    rows = [{"input_ids": [1, 2], "text": "hi", "weight": [1.0]}]
    with pytest.raises(DataError, match=r"text contains 'hi' .*numbers, one per token; or leave it out of columns"):
        prepare_rows(rows, columns=("input_ids", "text"))
    with pytest.raises(DataError, match="weight has 1 values and input_ids has 2"):
        prepare_rows(rows, columns=("input_ids", "weight"))


def test_tokens_of_weight_0_are_not_trained(prepare_rows):
    """Catches a run on nothing, counts of trained tokens that include them, and a weight that is no number."""
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "weights": weights} for weights in ([1, 0, 2], [1, 1, 0])]
    for changes in ({}, {"input_ids": "[1, 2, 3]"}):  # a string takes the plain path
        documents = prepare_rows([{**row, **changes} for row in rows], columns=("input_ids", "labels", "weights"))
        assert sorted(documents.document(index)[1].tolist() for index in (0, 1)) == [[-100, -100, 3], [-100, 2, -100]]
        assert documents.receipt.datasets[0].counts.trained_tokens == 2
    for weights, message in (
        ([1, 0, 0], "no token of .* is trained"),
        ([1, 1, float("nan")], "line 1: weights .* nan"),
    ):
        with pytest.raises(DataError, match=message):
            prepare_rows([{"input_ids": [1, 2, 3], "weights": weights}], columns=("input_ids", "weights"))
    with pytest.raises(DataError, match=r'multiply the losses with columns=\["input_ids", "weights"\]'):
        prepare_rows(rows)


def test_per_token_columns_that_some_datasets_lack_are_refused(tmp_path, text_options):
    """Catches weights that are dropped because another dataset comes first, and a crash in the middle of training."""
    ids = DatasetEntry(
        str(write_jsonl(tmp_path / "ids.jsonl", [{"input_ids": [1, 2], "w": [0.5, 1.0]}])), columns=("input_ids", "w")
    )
    text = DatasetEntry(str(write_jsonl(tmp_path / "text.jsonl", [{"text": "abc"}])), type="text")
    message = r"columns: entries\[{}\] has .* columns w, and entries\[{}\] does not"
    with pytest.raises(DataError, match=message.format(0, 1)):
        prepare([ids, text], text_options)
    with pytest.raises(DataError, match=message.format(1, 0)):
        prepare([text, ids], text_options)
    assert len(prepare([ids, ids], text_options)) == 2


def test_a_key_twice_in_an_array_is_named(tmp_path, options):
    """Catches the last of two values that is trained on silently."""
    path = tmp_path / "rows.json"
    path.write_text('[{"input_ids": [1, 2]}, {"input_ids": [1], "input_ids": [2]}]')
    with pytest.raises(DataError, match=r"rows.json, element 1 \(the first is 0\) has the key 'input_ids' twice"):
        prepare([DatasetEntry(path)], options)
