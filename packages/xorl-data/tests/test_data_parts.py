"""Parts: a dataset prepared in several goes, or stored in several files, is the dataset; and it can be uploaded."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pyarrow.parquet
import pytest

from data_files import make_rows, rows_of, write_jsonl
from xorl.data import DataError, DatasetEntry, prepare
from xorl.data import prepare as prepare_function
from xorl.data import push as push_module


@pytest.fixture
def corpus(tmp_path):
    rows = make_rows(60)
    return rows, DatasetEntry(str(write_jsonl(tmp_path / "rows.jsonl", rows)))


def published(options):
    return sorted(path.parent for path in options.prepared_path.glob("*/manifest.json"))


def test_parts_are_the_whole(corpus, options):
    """Catches rows lost between parts, and an order that depends on how the data was prepared."""
    _, entry = corpus
    shuffled = replace(options, shuffle_merged=True, shuffle_before_merging=True)
    expected = prepare([entry], shuffled)
    in_parts = prepare([replace(entry, preprocess_shards=4)], shuffled)
    assert len(published(options)) == 1 + 4
    assert in_parts.fingerprint == expected.fingerprint
    assert rows_of(in_parts) == rows_of(expected) == rows_of(pickle.loads(pickle.dumps(in_parts)))  # noqa: S301
    assert in_parts.receipt.total == expected.receipt.total
    assert not in_parts.receipt.datasets[0].cached
    again = prepare([replace(entry, preprocess_shards=4)], replace(shuffled, skip_prepare=True))
    assert (rows_of(again), again.fingerprint) == (rows_of(expected), expected.fingerprint)


def test_a_failure_costs_the_part_in_hand_alone(corpus, options, monkeypatch):
    """Catches a preparation of days that begins anew."""
    rows, entry = corpus
    entry = replace(entry, preprocess_shards=4)
    module = __import__("sys").modules["xorl.data.prepare"]
    publish, done = module._publish, []

    def failing(source, *arguments):
        if len(done) == 2:
            raise DataError("the third part")
        done.append(source.name)
        publish(source, *arguments)

    monkeypatch.setattr(module, "_publish", failing)
    with pytest.raises(DataError, match="the third part"):
        prepare([entry], options)
    kept = {folder.name: (folder / "input_ids.i32").stat().st_mtime_ns for folder in published(options)}
    assert len(kept) == 2
    monkeypatch.setattr(module, "_publish", publish)
    assert rows_of(prepare([entry], options)) == rows
    times = {folder.name: (folder / "input_ids.i32").stat().st_mtime_ns for folder in published(options)}
    assert len(times) == 4
    assert kept.items() <= times.items()


def test_several_files_hold_the_same_documents(corpus, options):
    """Catches a document cut in two by the end of a file, and an order that depends on the number of files."""
    rows, entry = corpus
    expected = prepare([entry], options)
    for num_files in (2, 7, 60):
        documents = prepare([entry], replace(options, num_files=num_files))
        assert rows_of(documents) == rows
        assert documents.fingerprint == expected.fingerprint
        manifests = {path: json.loads((path / "manifest.json").read_text()) for path in published(options)}
        folder = next(path for path, manifest in manifests.items() if manifest["num_files"] == num_files)
        names = sorted(path.name for path in folder.glob("input_ids*"))
        assert names == [f"input_ids-{index:05}-of-{num_files:05}.i32" for index in range(num_files)]
        sizes = [path.stat().st_size for path in folder.glob("input_ids*")]
        assert sum(sizes) == 4 * expected.lengths.sum()
        assert max(sizes) <= sum(sizes) / num_files + 2 * 4 * expected.lengths.max()
    with pytest.raises(DataError, match=r"num_files: 61 files are more than the 60 documents; set it to 60"):
        prepare([entry], replace(options, num_files=61))
    assert [path for path in options.prepared_path.iterdir() if path.name.startswith(".")] == []


class Hub:
    """What huggingface_hub's HfApi does, in a folder."""

    def __init__(self, root, calls):
        self.root, self.calls = root, calls

    def __call__(self, token):
        self.calls.append(("token", token))
        return self

    def create_repo(self, repo_id, **options):
        self.calls.append(("create", repo_id, options))
        (self.root / repo_id).mkdir(parents=True, exist_ok=True)

    def upload_folder(self, *, repo_id, folder_path, **options):
        self.calls.append(("upload", repo_id, options["repo_type"]))
        for path in sorted(folder_path.rglob("*.parquet")):
            target = self.root / repo_id / path.relative_to(folder_path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())


def test_what_was_pushed_is_read_back_as_it_was(corpus, options, tmp_path, monkeypatch):
    """Catches an upload that is not what is trained on, that comes twice, or that is made without the token."""
    calls = []
    monkeypatch.setattr(push_module, "HfApi", Hub(tmp_path / "hub", calls))
    documents = prepare([corpus[1]], replace(options, shuffle_merged=True))
    for _ in range(2):
        push_module.push_documents(documents, "org/name", options.prepared_path, token=True, num_files=3)
    assert [call[0] for call in calls] == ["token", "create", "upload"]
    assert calls[0] == ("token", True)
    assert calls[1][2] == {"repo_type": "dataset", "private": True, "exist_ok": True}
    files = sorted((tmp_path / "hub/org/name/data").iterdir())
    assert [path.name for path in files] == [f"train-{index:05}-of-00003.parquet" for index in range(3)]
    assert sum(pyarrow.parquet.read_metadata(path).num_rows for path in files) == 60
    again = prepare_function([DatasetEntry(str(tmp_path / "hub/org/name"))], options)
    assert rows_of(again) == rows_of(documents)
    assert np.array_equal(again.num_trained, documents.num_trained)


def test_a_push_that_fails_says_so_and_is_made_up_for(corpus, options, tmp_path, monkeypatch):
    """Catches a failed upload that is taken for done."""
    calls = []
    hub = Hub(tmp_path / "hub", calls)
    monkeypatch.setattr(push_module, "HfApi", hub)
    documents = prepare([corpus[1]], options)
    works = hub.upload_folder
    hub.upload_folder = lambda **_: (_ for _ in ()).throw(OSError("no route"))
    with pytest.raises(push_module.DataFailure, match=r"repo_id: the upload to org/name failed: no route"):
        push_module.push_documents(documents, "org/name", options.prepared_path, token=True)
    hub.upload_folder = works
    push_module.push_documents(documents, "org/name", options.prepared_path, token=True)
    assert calls[-1][0] == "upload"
    assert [path for path in options.prepared_path.iterdir() if path.name.startswith(".")] == []
