"""Preparing: the cache hits when nothing changed and only then, is published whole, and is written by one process."""

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest

from data_files import make_rows, rows_of, write_as, write_jsonl
from full_disk import full_disk
from xorl.data import DataError, DataFailure, DatasetEntry, PrepareOptions, pack, prepare, split_documents
from xorl.data.saved import SavedStore

prepare_module = sys.modules["xorl.data.prepare"]


def published(options):
    return sorted(path.parent.name for path in options.prepared_path.glob("*/manifest.json"))


def test_moved_data_hits_and_one_changed_byte_misses(tmp_path, options):
    """Catches training on yesterday's tokens, even where size and time of the file are as they were."""
    path = write_jsonl(tmp_path / "rows.jsonl", make_rows(20))
    before = prepare([DatasetEntry(path)], options)
    moved = path.rename(tmp_path / "moved.jsonl")
    assert prepare([DatasetEntry(str(moved))], options).receipt.datasets[0].cached
    stat = moved.stat()
    content = bytearray(moved.read_bytes())
    digit = content.rindex(b"]") - 1
    content[digit] = ord("1") if content[digit] != ord("1") else ord("2")
    moved.write_bytes(content)
    os.utime(moved, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = prepare([DatasetEntry(str(moved))], options)
    assert not after.receipt.datasets[0].cached
    assert after.fingerprint != before.fingerprint
    assert rows_of(after) != rows_of(before)


def test_options_that_decide_documents_are_part_of_the_key_and_others_are_not(prepare_rows, options):
    """Catches a key that misses an option, and a copy of the data for every seed."""

    def is_cached(options=options, **entry):
        return prepare_rows(make_rows(20), options, **entry).receipt.datasets[0].cached

    assert not is_cached()
    for changes in ({"seed": 5}, {"shuffle_merged": True}, {"vocab_size": None}, {"num_proc": 2}):
        assert is_cached(replace(options, **changes))
    for entry in (
        {"max_seq_len": 8},
        {"max_seq_len": 8, "overflow": "split", "overflow_limit": 1.0},
        {"columns": ("input_ids",)},
        {"shards": 2, "shards_idx": 0},
        {"shards": 2, "shards_idx": 1},
    ):
        assert not is_cached(**entry)
    assert not is_cached(replace(options, bin_len=32), overflow_limit=1.0)
    assert len(published(options)) == 7
    assert list(options.prepared_path.glob("*.json")) == []


def test_several_datasets_are_merged_and_shuffled_by_seed(tmp_path, options):
    """Catches rows lost in the merge, an order that ignores the seed, and shuffling that nobody asked for."""
    first, second = make_rows(30), make_rows(20, seed=1)
    files = {"first.jsonl": first, "second.jsonl": second}
    entries = [DatasetEntry(write_jsonl(tmp_path / name, rows)) for name, rows in files.items()]
    assert rows_of(prepare(entries, options)) == first + second

    def merged(**changes):
        return prepare(entries, replace(options, **changes))

    def key(row):
        return row["input_ids"]

    each = rows_of(merged(shuffle_before_merging=True))
    assert each[:30] != first
    assert sorted(each[:30], key=key) == sorted(first, key=key)
    both = merged(shuffle_merged=True, seed=1)
    assert sorted(rows_of(both), key=key) == sorted(first + second, key=key)
    assert rows_of(both) == rows_of(merged(shuffle_merged=True, seed=1))
    assert rows_of(both) != rows_of(merged(shuffle_merged=True, seed=2))
    fingerprints = {d.fingerprint for d in (both, merged(), merged(shuffle_merged=True, seed=2), merged(seed=9))}
    assert len(fingerprints) == 3
    parts = [rows_of(merged(dataset_shard_num=3, dataset_shard_idx=i)) for i in range(3)]
    assert [row for part in parts for row in part] == first + second


def test_the_receipt_accounts_for_every_sample(tmp_path, options):
    """Catches samples that vanish with one line of log."""
    rows = [{"input_ids": list(range(1, n + 1))} for n in (10, 3, 20, 5)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    limits = ({}, {"overflow": "drop", "overflow_limit": 1.0}, {"overflow": "split"})
    documents = prepare([DatasetEntry(path, max_seq_len=8, **limit) for limit in limits], options)
    counts = [dataset.counts for dataset in documents.receipt.datasets]
    assert [(c.samples, c.kept, c.truncated, c.dropped, c.split, c.documents, c.tokens) for c in counts] == [
        (4, 4, 2, 0, 0, 4, 24),
        (4, 2, 0, 2, 0, 2, 8),
        (4, 4, 0, 0, 2, 7, 38),
    ]
    total = documents.receipt.total
    assert total.samples == 12
    assert total.tokens == documents.lengths.sum()
    assert total.trained_tokens == documents.num_trained.sum() == 70 - 13
    bins = pack(documents.lengths, bin_len=64)
    receipt = documents.receipt.with_bins(
        num_bins=len(bins), fill=bins.fill, plan_hash="abc", packed={"documents": len(documents)}
    )
    assert len(receipt.lines()) == 5
    assert "truncated=2" in receipt.lines()[0]
    assert receipt.lines()[-1] == f"bins={len(bins)} documents={len(documents)} fill={bins.fill:.2%} plan=abc"
    assert json.loads(json.dumps(receipt.as_dict()))["total"]["samples"] == 12


def test_held_out_documents_are_drawn_once_and_by_seed(prepare_rows):
    """Catches held-out documents that are trained on, or that change between runs."""
    documents = prepare_rows(make_rows(40))
    train, held_out = split_documents(documents, 0.1, seed=3)
    assert (len(train), len(held_out)) == (36, 4)
    together = rows_of(train) + rows_of(held_out)
    assert sorted(map(str, together)) == sorted(map(str, rows_of(documents)))
    assert rows_of(split_documents(documents, 4, seed=3)[1]) == rows_of(held_out)
    assert rows_of(split_documents(documents, 4, seed=4)[1]) != rows_of(held_out)
    assert len({documents.fingerprint, train.fingerprint, held_out.fingerprint}) == 3
    assert np.array_equal(train.lengths, [len(row["input_ids"]) for row in rows_of(train)])


def test_dummy_needs_no_disk_and_is_the_same_every_time(options):
    """Catches random data that differs between ranks, and two entries that are one."""
    entry = DatasetEntry("dummy", max_seq_len=48)
    documents = prepare([entry, entry], replace(options, dummy_documents=10))
    again = prepare([entry, entry], replace(options, dummy_documents=10))
    assert (len(documents), set(documents.lengths.tolist())) == (20, {48})
    for index in range(20):
        assert np.array_equal(documents.document(index)[0], again.document(index)[0])
    distinct = {tuple(documents.document(index)[0].tolist()) for index in range(20)}
    assert len(distinct) == 20
    assert all(0 <= id_ < 1000 for ids in distinct for id_ in ids)
    assert not options.prepared_path.exists()
    other = prepare([entry], replace(options, dummy_documents=10, seed=1))
    assert tuple(other.document(0)[0].tolist()) not in distinct


@pytest.mark.parametrize(
    ("entry", "changes"), [({"max_seq_len": 2}, {"shuffle_merged": True}), ({"preprocess_shards": 2}, {"num_files": 3})]
)
def test_selected_columns_reach_the_documents_as_extras(prepare_rows, options, entry, changes):
    """Catches extras that are cut or ordered unlike their tokens, also in several parts and files."""
    rows = [{"input_ids": [i, i + 1, i + 2], "weight": [i / 2, 1.0, 0.25]} for i in range(1, 20)]
    documents = prepare_rows(rows, replace(options, **changes), columns=("input_ids", "weight"), **entry)
    assert documents.extra_names == ("weight",)
    for index in range(19):
        ids, _ = documents.document(index)
        assert documents.extras(index)["weight"].tolist() == [ids[0] / 2, 1.0, 0.25][: len(ids)]


def test_labels_that_appear_late_are_told_apart_from_tokens(prepare_rows, options, monkeypatch):
    """Catches a labels file that starts in the middle: all later labels would be shifted against their tokens."""
    monkeypatch.setattr("xorl.data.readers.CHUNK_BYTES", 100)
    plain = [{"input_ids": [i, 2, 3], "labels": [i, 2, 3]} for i in range(30)]
    masked = [{"input_ids": [i, 2, 3], "labels": [-100, 2, 3]} for i in range(30)]
    for rows in (plain + masked + plain, plain):
        assert rows_of(prepare_rows(rows)) == rows
    sizes = [len(list((options.prepared_path / key).glob("labels.i32"))) for key in published(options)]
    assert sorted(sizes) == [0, 1]


def test_rows_with_and_without_labels_in_far_places_are_refused(prepare_rows, monkeypatch):
    """Catches the half of a dataset that is trained on as a whole because its chunks were read apart."""
    monkeypatch.setattr("xorl.data.readers.CHUNK_BYTES", 100)
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 10 + [{"input_ids": [1, 2, 3]}] * 10
    with pytest.raises(DataError, match=r"(line 1 on have labels.*on have none|the row has no labels, but other rows)"):
        prepare_rows(rows)


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_processes_change_nothing(tmp_path, options, monkeypatch, suffix):
    """Catches chunks that come back from the pool in another order, and errors that lose their place on the way."""
    monkeypatch.setattr(prepare_module, "_PARALLEL_BYTES", 0)
    monkeypatch.setattr("xorl.data.readers.CHUNK_BYTES", 400)
    rows = make_rows(60)
    path = write_as(suffix[1:], tmp_path, rows)
    alone = prepare([DatasetEntry(path)], options)
    pooled = prepare([DatasetEntry(path)], replace(options, prepared_path=tmp_path / "other", num_proc=3))
    assert not pooled.receipt.datasets[0].cached
    assert rows_of(pooled) == rows_of(alone)
    assert pooled.fingerprint == alone.fingerprint
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:50], "oops", *lines[50:]]))
    with pytest.raises(DataError, match=f"{path}, line 51"):
        prepare([DatasetEntry(path)], replace(options, num_proc=3))


def test_documents_travel_by_reference(prepare_rows):
    """Catches documents copied into every worker."""
    documents = prepare_rows(make_rows(2000))
    data = pickle.dumps(documents)
    assert len(data) < 2000 * 40
    assert rows_of(pickle.loads(data)) == rows_of(documents)  # noqa: S301  (written by this test)


def test_a_damaged_folder_is_refused(prepare_rows, options):
    """Catches reading beyond a file that lost its end."""
    prepare_rows(make_rows(20))
    ids = next(options.prepared_path.glob("*/input_ids.i32"))
    ids.write_bytes(ids.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"input_ids.i32 has .* bytes, but the manifest says .*prepare again"):
        prepare_rows(make_rows(20))


# skip_prepare


def test_skipping_loads_without_looking_at_the_source(tmp_path, options):
    """Catches a skip that prepares, or that takes what was prepared for something else."""
    entries = [
        DatasetEntry(str(write_jsonl(tmp_path / f"{n}.jsonl", make_rows(10, seed=n))), max_seq_len=32) for n in (1, 2)
    ]
    expected = prepare(entries, options)
    for entry in entries:
        Path(entry.path).unlink()
    skipping = replace(options, skip_prepare=True)
    assert rows_of(prepare(entries, skipping)) == rows_of(expected)
    assert prepare(entries, skipping).fingerprint == expected.fingerprint
    folder = options.prepared_path / published(options)[0]
    direct = prepare(entries, replace(skipping, prepared_path=folder))
    assert len(direct) == 10
    with pytest.raises(DataError, match=r"(?s)entries\[0\]: .* has no prepared dataset for .*but limit=32"):
        prepare([replace(entries[0], max_seq_len=16)], skipping)
    with pytest.raises(DataError, match="is not a folder"):
        prepare(entries, replace(skipping, prepared_path=tmp_path / "none"))
    with pytest.raises(DataError, match=r"has a document of \d+ tokens, more than bin_len = 8"):
        prepare([DatasetEntry("x")], replace(skipping, prepared_path=folder, bin_len=8))


def test_skipping_reads_a_saved_dataset_in_place(tmp_path, options):
    """Catches a saved dataset that is copied, misread across its batches, or taken although it needs preparing."""
    rows = make_rows(50)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved", num_shards=2)
    skipping = replace(options, skip_prepare=True, prepared_path=tmp_path / "saved")
    documents = prepare([DatasetEntry("unused")], skipping)
    assert rows_of(documents) == rows
    assert rows_of(pickle.loads(pickle.dumps(documents))) == rows  # noqa: S301  (written by this test)
    assert documents.receipt.total.trained_tokens == documents.num_trained.sum()
    assert isinstance(documents._stores[0], SavedStore)
    with pytest.raises(DataError, match=r"the id .* but the model's vocab_size is 10"):
        prepare([DatasetEntry("unused")], replace(skipping, vocab_size=10))
    with pytest.raises(DataError, match="overflow is error"):
        prepare([DatasetEntry("unused")], replace(skipping, bin_len=8))
    for name, bad in (
        ("padded", [{"input_ids": [1, 2], "attention_mask": [1, 0]}]),
        ("text", [{"input_ids": "1 2"}]),
        ("nulls", [{"input_ids": [1, None]}]),
        ("ids", [{"ids": [1, 2]}]),
    ):
        datasets.Dataset.from_list(bad).save_to_disk(tmp_path / name)
        with pytest.raises(DataError, match=f"{tmp_path / name}"):
            prepare([DatasetEntry("unused")], replace(skipping, prepared_path=tmp_path / name))


# Crashes and company

SCRIPT = """
import logging, sys, time
from pathlib import Path
import xorl.data.store as store
from xorl.data import DatasetEntry, PrepareOptions, prepare

logging.basicConfig(level=logging.INFO, stream=sys.stdout)
path, prepared, gate, num_proc = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
sys.modules["xorl.data.prepare"]._PARALLEL_BYTES = 0
sys.modules["xorl.data.readers"].CHUNK_BYTES = 2000
append = store.FlatStoreWriter.append
def append_and_wait(self, documents):
    append(self, documents)
    print("appended", flush=True)
    while not gate.exists():
        time.sleep(0.01)
store.FlatStoreWriter.append = append_and_wait
documents = prepare([DatasetEntry(path)], PrepareOptions(bin_len=64, prepared_path=prepared, num_proc=num_proc))
print("cached", documents.receipt.datasets[0].cached, documents.fingerprint, flush=True)
"""


def start(path, prepared, gate, num_proc=1):
    """A process that stops in the middle of preparing until the file `gate` is there."""
    command = [sys.executable, "-c", SCRIPT, str(path), str(prepared), str(gate), str(num_proc)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def read_until(process, words):
    return next(line for line in process.stdout if words in line)


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_killed_preparation_leaves_nothing_that_is_taken_for_done(tmp_path, options, num_proc):
    """Catches a half-written folder that is loaded, litter that stays, and a lock that the dead still hold."""
    rows = make_rows(200)
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with start(path, options.prepared_path, tmp_path / "gate", num_proc) as process:
        read_until(process, "appended")
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert published(options) == []
    assert list(options.prepared_path.glob(".*.tmp-*"))
    started = time.monotonic()
    documents = prepare([DatasetEntry(path)], options)
    assert time.monotonic() - started < 20
    assert rows_of(documents) == rows
    assert not documents.receipt.datasets[0].cached
    assert not list(options.prepared_path.glob(".*.tmp-*"))


def test_two_processes_prepare_once_and_the_waiting_one_says_for_whom(tmp_path, options):
    """Catches work done twice, and a silent wait."""
    path, gate = write_jsonl(tmp_path / "rows.jsonl", make_rows(200)), tmp_path / "gate"
    with start(path, options.prepared_path, gate) as first:
        read_until(first, "appended")
        with start(path, options.prepared_path, gate) as second:
            waiting = read_until(second, "phase=wait")
            gate.touch()
            outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert f"holder=pid {first.pid} on " in waiting
    (_, cached, fingerprint), (_, cached_too, same) = (output.splitlines()[-1].split() for output in outputs)
    assert (cached, cached_too) == ("False", "True")
    assert fingerprint == same
    assert "appended" not in outputs[1]


def test_progress_is_logged(tmp_path, options, caplog, monkeypatch):
    """Catches the silent first minutes of a large preparation."""
    monkeypatch.setattr(prepare_module, "_REPORT_EVERY_S", 0.0)
    caplog.set_level(logging.DEBUG, logger="xorl.data")
    path = write_jsonl(tmp_path / "rows.jsonl", make_rows(20))
    prepare([DatasetEntry(path)], PrepareOptions(bin_len=64, prepared_path=options.prepared_path))
    assert "phase=encode samples=20" in caplog.text
    assert f"dataset={path} cached=false" in caplog.text


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, options):
    # Catches a write error of the clean-up in place of the message, and what was half written left on the full disk.
    path = write_jsonl(tmp_path / "rows.jsonl", make_rows(100))
    with full_disk(512), pytest.raises(DataFailure, match=r"prepared_path"):
        prepare([DatasetEntry(path)], options)
    assert [file for file in options.prepared_path.iterdir() if file.suffix != ".lock"] == []
    prepare([DatasetEntry(path)], options)


def test_an_empty_shard_is_told_from_an_empty_dataset(prepare_rows):
    # Catches a message that sends the user to look into a file that is fine.
    with pytest.raises(DataError, match=r"shard 50 of 100.* is empty"):
        prepare_rows([{"input_ids": [1, 2, 3]}] * 2, shards=100, shards_idx=50)
