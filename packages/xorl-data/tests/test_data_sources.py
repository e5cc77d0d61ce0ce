"""Sources: every format gives the same rows, and files, splits and shards are found as they are named."""

import bz2
import gzip
import json
import lzma

import datasets
import pyarrow as pa
import pytest

from data_files import make_rows, rows_of, write_as, write_jsonl
from xorl.data import DataError, DatasetEntry, prepare
from xorl.data import readers as readers_module
from xorl.data.hub import load_hub_source
from xorl.data.readers import read_chunks
from xorl.data.sources import FileSource, load_source, shard_range


def read(source):
    return [row for chunk in source.chunks(None) for row in chunk.rows()]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_every_format_gives_the_same_rows(tmp_path, options, kind):
    """Catches a format whose rows come back changed, short or in another order."""
    rows = make_rows(33)
    path = write_as(kind, tmp_path / "data", rows)
    for entry in (DatasetEntry(path), DatasetEntry(str(path.parent))):
        documents = prepare([entry], options)
        assert rows_of(documents) == rows
        assert documents.receipt.total.samples == 33


def test_text_lines_are_ids_separated_by_spaces_or_json(tmp_path, options):
    """Catches text lines taken for text, and a last line lost for want of a newline."""
    path = tmp_path / "ids.txt"
    path.write_text("1 2 3\n[4, 5, 6]\n\n  7\t8 \n9 10")
    documents = prepare([DatasetEntry(path)], options)
    assert [row["input_ids"] for row in rows_of(documents)] == [[1, 2, 3], [4, 5, 6], [7, 8], [9, 10]]
    assert all(row["labels"] == row["input_ids"] for row in rows_of(documents))


def test_a_saved_dataset_and_a_saved_split_are_read(tmp_path, options):
    """Catches a change of the layout that datasets.save_to_disk writes."""
    rows, held_out = make_rows(20), make_rows(5, seed=1)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "one", num_shards=3)
    splits = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(held_out)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    assert rows_of(prepare([DatasetEntry(str(tmp_path / "one"))], options)) == rows
    assert rows_of(prepare([DatasetEntry(str(tmp_path / "splits"))], options)) == rows
    assert rows_of(prepare([DatasetEntry(str(tmp_path / "splits"), split="test")], options)) == held_out
    with pytest.raises(DataError, match=r"entries\[0\].split: .* no split 'dev'; it has train, test"):
        prepare([DatasetEntry(str(tmp_path / "splits"), split="dev")], options)


def test_a_hub_dataset_is_read_through_datasets(tmp_path, monkeypatch):
    """Catches a mistake in how the library is called; a local repository stands in for the Hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = make_rows(11)
    write_jsonl(tmp_path / "repo" / "train.jsonl", rows)
    write_jsonl(tmp_path / "repo" / "test.jsonl", rows[:4])

    def load(**changes):
        return load_hub_source(DatasetEntry(str(tmp_path / "repo"), **changes), option="entries[0]", token=None)

    assert read(load()) == rows
    assert read(load(split="test")) == rows[:4]
    assert read(load(split="train[:3]")) == rows[:3]
    assert load().identity() == load().identity() != load(split="train[:3]").identity()
    with pytest.raises(DataError, match=r"entries\[0\]: .* \(split dev\) cannot be loaded: .*train.*test"):
        load(split="dev")


def test_an_unreachable_hub_is_the_environment_and_a_bare_name_a_missing_path(monkeypatch):
    """Catches half a minute of retries for a misspelt file name, and a network failure reported as bad input."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"entries\[0\].path: no-such-file does not exist"):
        load_source(DatasetEntry("no-such-file"))
    with pytest.raises((RuntimeError, DataError), match=r"entries\[0\].path: nobody-xyz/nothing"):
        load_source(DatasetEntry("nobody-xyz/nothing"))


def test_data_files_are_names_or_globs_in_the_folder(tmp_path):
    """Catches files taken in another order, or a pattern that matches nothing and trains on nothing."""
    rows = make_rows(6)
    for index in range(3):
        write_jsonl(tmp_path / "sub" / f"part{index}.data", rows[2 * index : 2 * index + 2])

    def entry(data_files, ds_type="json"):
        return DatasetEntry(str(tmp_path), data_files=data_files, ds_type=ds_type)

    assert read(load_source(entry("sub/*.data"))) == rows
    assert read(load_source(entry(["sub/part2.data", "**/part0.data"]))) == rows[4:6] + rows[:2]
    with pytest.raises(DataError, match=r"entries\[0\].data_files: 'sub/\*.json' matches no file"):
        load_source(entry("sub/*.json"))
    with pytest.raises(DataError, match=r"the name of .*part2.data does not show its type; set entries\[0\].ds_type"):
        load_source(entry("sub/part2.data", ds_type=None))


def test_splits_in_file_names_are_kept_apart(tmp_path):
    """Catches a folder whose test file is trained on, and a file left out because its folder says otherwise."""
    rows = make_rows(4)
    write_jsonl(tmp_path / "data" / "train-00000.jsonl", rows[:1])
    write_jsonl(tmp_path / "data" / "train-00001.jsonl", rows[1:2])
    write_jsonl(tmp_path / "data" / "validation.jsonl", rows[2:])
    (tmp_path / "data" / "README.md").write_text("about")
    (tmp_path / "data" / ".hidden.jsonl").write_text("{")
    assert read(load_source(DatasetEntry(str(tmp_path)))) == rows[:2]
    assert read(load_source(DatasetEntry(str(tmp_path / "data"), split="validation"))) == rows[2:]
    with pytest.raises(DataError, match=r"'test' not found; .* name the splits train, validation"):
        load_source(DatasetEntry(str(tmp_path), split="test"))
    write_jsonl(tmp_path / "train" / "eval-0.jsonl", rows)
    with pytest.raises(
        DataError, match=r"train/eval-0.jsonl in .* names two splits \(train and test\); list the files"
    ):
        load_source(DatasetEntry(str(tmp_path)))
    assert read(load_source(DatasetEntry(str(tmp_path), split="validation"))) == rows[2:]
    (tmp_path / "train" / "eval-0.jsonl").unlink()
    write_jsonl(tmp_path / "more.jsonl", rows)
    with pytest.raises(DataError, match=r"\(train-00000.jsonl\) and some do not \(more.jsonl\)"):
        load_source(DatasetEntry(str(tmp_path)))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_shards_are_consecutive_parts_that_cover_everything(tmp_path, options, kind, monkeypatch):
    """Catches rows lost or doubled between shards, also where a shard cuts through chunks."""
    monkeypatch.setattr(readers_module, "CHUNK_BYTES", 700)
    rows = make_rows(31)
    path = str(write_as(kind, tmp_path, rows))
    assert len(list(read_chunks(tmp_path / path, readers_module.file_type(tmp_path / path)))) > 3
    parts = [rows_of(prepare([DatasetEntry(path, shards=4, shards_idx=index)], options)) for index in range(4)]
    assert [len(part) for part in parts] == [8, 8, 8, 7]
    assert [row for part in parts for row in part] == rows
    assert [shard_range(10, 3, index) for index in range(3)] == [(0, 4), (4, 7), (7, 10)]


COMPRESSIONS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_pieces_cover_a_file_in_order_with_true_line_numbers(tmp_path, monkeypatch, suffix):
    """Catches lines lost, doubled or misnumbered where chunks meet, in plain and in compressed files."""
    monkeypatch.setattr(readers_module, "CHUNK_BYTES", 500)
    rows = make_rows(40)
    text = "\ufeff" + "".join(json.dumps(row) + ("\r\n" if i % 3 else "\n\n") for i, row in enumerate(rows))
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](text.encode()))
    chunks = list(read_chunks(path, "json"))
    assert len(chunks) > 5
    assert [row for chunk in chunks for row in chunk.rows()] == rows
    tables = [chunk.table(("input_ids", "labels")) for chunk in chunks]
    assert [row for table in tables for row in table.to_pylist()] == rows
    numbers = [number for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    places = [chunk.location(index) for chunk in chunks for index in range(chunk.num_rows())]
    assert places == [f"{path}, line {number}" for number in numbers]


def test_a_json_array_is_decoded_while_it_is_read(tmp_path, monkeypatch):
    """Catches an array read whole into memory, and elements cut where blocks meet."""
    monkeypatch.setattr(readers_module, "CHUNK_BYTES", 97)
    rows = make_rows(25)
    for indent in (None, 2):
        path = tmp_path / "rows.json"
        path.write_text(" \n" + json.dumps(rows, indent=indent) + " \n")
        chunks = list(read_chunks(path, "json"))
        assert len(chunks) > 5
        assert [row for chunk in chunks for row in chunk.rows()] == rows
        assert chunks[1].location(0).startswith(f"{path}, element {chunks[0].num_rows()} ")
    path.write_text("[]")
    assert list(read_chunks(path, "json")) == []


def test_the_identity_is_content_not_place(tmp_path):
    """Catches a cache key that changes when data is moved, or stays when it is edited."""
    first = write_jsonl(tmp_path / "a.jsonl", make_rows(3))
    second = write_jsonl(tmp_path / "elsewhere" / "b.jsonl", make_rows(3))
    other = write_jsonl(tmp_path / "c.jsonl", make_rows(3, seed=1))
    identities = [FileSource(str(path), (path,), "json").identity() for path in (first, second, other)]
    assert identities[0] == identities[1] != identities[2]


def test_a_hub_file_of_another_type_than_ds_type_is_refused():
    # Catches a ds_type that is accepted and ignored because the Hub's library goes by the file's name.
    entry = DatasetEntry(path="org/name", data_files=["a.jsonl", "b.csv"], ds_type="json")
    with pytest.raises(DataError, match=r"ds_type: json, but the name of b\.csv"):
        load_source(entry, option="entries[0]")
