"""Bad rows that are skipped on request: counted, named, and limited, in every format, prepared and streamed."""

import json
import logging

import pytest

from data_files import write_jsonl
from xorl.data import DataError, DatasetEntry, prepare
from xorl.data.stream import StreamLoader, StreamPlan, StreamTally, check_first_samples

GOOD = {
    "text": {"text": "a"},
    "chat": {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    "prompt_completion": {"prompt": "a", "completion": "b"},
    "tokenized": {"input_ids": [1, 2, 3]},
}
# A row that cannot be rendered, one that cannot be tokenized, and a line that is not JSON.
BAD = {
    "text": [{"text": 5}, {"text": "\ud83d"}, {"other": "a"}],
    "chat": [
        {"messages": []},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"messages": GOOD["chat"]["messages"][1:]},
    ],
    "prompt_completion": [{"prompt": "a"}, {"prompt": "a", "completion": ""}, {"prompt": "a", "completion": "\ud83d"}],
    "tokenized": [{"input_ids": ["a"]}, {"input_ids": [-1]}, {"input_ids": [1], "labels": [1, 2]}],
}


def write(path, rows):
    """Rows, and at the end something that is no row."""
    lines = [json.dumps(row) for row in rows]
    if path.suffix == ".json":
        path.write_text(f"[{','.join(lines)}, 5]")
    else:
        path.write_text("".join(f"{line}\n" for line in [*lines, "{"]))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize("kind", GOOD)
def test_bad_rows_are_skipped_and_counted(text_stream, text_options, tmp_path, caplog, kind, suffix):
    """Catches a run that cannot be started for one bad row, and rows that are skipped without a word."""
    rows = [row for bad in BAD[kind] for row in (GOOD[kind], GOOD[kind], GOOD[kind], bad)]
    path = write(tmp_path / f"rows.{suffix}", rows)
    for limit in ({}, {"skip_bad_rows": 0.1}):
        with pytest.raises(DataError, match="rows") as caught:
            prepare([DatasetEntry(path, type=kind, **limit)], text_options)
        with pytest.raises(DataError, match="rows"):
            check_first_samples(text_stream(path, bin_len=64, type=kind, **limit))
    assert "4 of the 13 samples" in str(caught.value)
    assert "more than 10.00%, the limit of entries[0].skip_bad_rows" in str(caught.value)
    entry = DatasetEntry(path, type=kind, skip_bad_rows=0.5)
    alone = write_jsonl(tmp_path / "good.jsonl", [GOOD[kind]] * 9)
    expected = prepare([DatasetEntry(alone, type=kind)], text_options)
    for _ in range(2):  # prepared, and loaded
        caplog.clear()
        documents = prepare([entry], text_options)
        counts = documents.receipt.total
        assert (counts.samples, counts.skipped, counts.kept, counts.documents) == (13, 4, 9, 9)
        assert all((documents.document(i)[0] == expected.document(i)[0]).all() for i in range(9))
        assert "skipped_rows=4 of=13 limit=50.00%" in caplog.text
        named = documents.receipt.datasets[0].findings.problems
        assert [str(path) in problem for problem in named] == [True] * 4
        assert all(problem in caplog.text for problem in named)
    with caplog.at_level(logging.INFO):
        stream = check_first_samples(text_stream(path, bin_len=64, type=kind, skip_bad_rows=0.5))
    assert sorted(stream.findings[0].problems) == sorted(named)
    receipt = receipt_of(stream)
    assert (receipt.total.skipped, receipt.total.samples) == (4 * receipt.total.samples // 13, receipt.total.samples)
    assert receipt.total.skipped >= 4


def receipt_of(stream):
    """The receipt after some steps, in which whole epochs are read."""
    plan = StreamPlan.over(stream, bins_per_step=1, max_steps=3)
    loader = StreamLoader(stream, plan, micro_batch_size=1)
    for _ in loader.steps():
        pass
    return loader.tally.receipt(None)


def test_lines_of_csv_files_with_other_numbers_of_values_are_bad_rows(text_options, tmp_path):
    """Catches CSV files that cannot be read at all for one line."""
    path = tmp_path / "rows.csv"
    path.write_text("text,b\na,1\nx,y,z\nb,2\n")
    with pytest.raises(DataError, match=r"rows.csv, line 3 .* has 3 values, want 2, one for each column: 'x,y,z'"):
        prepare([DatasetEntry(path, type="text")], text_options)
    documents = prepare([DatasetEntry(path, type="text", skip_bad_rows=0.5)], text_options)
    assert (documents.receipt.total.skipped, len(documents)) == (1, 2)


def test_faults_that_are_not_of_one_row_are_not_skipped(prepare_rows, text_options, tmp_path):
    """Catches a dataset without any usable row, or a file that is not what it says, taken for an empty one."""
    with pytest.raises(DataError, match=r"no documents: of 3 samples .* 3 cannot be used"):
        prepare_rows([{"other": 1}] * 3, text_options, type="text", skip_bad_rows=1.0)
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 is not enough")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        prepare([DatasetEntry(path, type="text", skip_bad_rows=1.0)], text_options)
    rows = [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2]}]
    with pytest.raises(DataError, match="line 2: the row has no labels, but other rows have them"):
        prepare_rows(rows, text_options, skip_bad_rows=1.0)


def test_a_tally_of_a_version_with_fewer_counts_is_read(text_stream, tmp_path):
    """Catches streams that cannot be resumed since a count was added."""
    stream = text_stream(write_jsonl(tmp_path / "rows.jsonl", [GOOD["text"]] * 9), type="text")
    values = StreamTally(stream).values.tolist()
    saved = [*range(1, len(values) - 2), 7, 8]  # the last count of the entry is missing
    assert StreamTally(stream, saved).values.tolist() == [*saved[:-2], 0, 7, 8]
