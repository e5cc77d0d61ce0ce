"""Preparation that is killed, or whose source fails, leaves nothing that is taken for data, and in the end nothing."""

import gzip
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from xorl.data import DataError, DatasetEntry, PrepareOptions, lock, prepare

NUM_KILLS = 20


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetEntry:
    monkeypatch.setattr(sys.modules["xorl.data.prepare"], "_PARALLEL_BYTES", 0)
    monkeypatch.setattr("xorl.data.readers.CHUNK_BYTES", 4000)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": list(range(i % 50 + 2))}) + "\n" for i in range(3000)))
    return DatasetEntry(str(path))


def content_of(folder: Path) -> dict[str, str]:
    """Every file below a folder with a hash of its content; of manifests without the time they were made."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if path.name == "manifest.json":
            data = json.dumps({**json.loads(data), "created": 0}).encode()
        found[str(path.relative_to(folder))] = sha256(data).hexdigest()
    return found


@pytest.mark.parametrize(("num_proc", "preprocess_shards"), [(1, None), (2, None), (1, 3)])
def test_twenty_kills_leave_what_no_kill_leaves(
    corpus: DatasetEntry, tmp_path: Path, num_proc: int, preprocess_shards: int | None
) -> None:
    # Catches a moment at which a kill leaves half a dataset, a lock that nobody takes over, or rubbish that stays.
    entry = replace(corpus, preprocess_shards=preprocess_shards)
    undisturbed = PrepareOptions(bin_len=64, prepared_path=tmp_path / "undisturbed", num_proc=num_proc)
    started = time.monotonic()
    prepare([entry], undisturbed)
    whole_s = time.monotonic() - started
    options = replace(undisturbed, prepared_path=tmp_path / "killed")
    moments = random.Random(num_proc)
    context = multiprocessing.get_context("fork")
    num_killed = 0
    while num_killed < NUM_KILLS:
        process = context.Process(target=prepare, args=([entry], options))
        started = time.monotonic()
        process.start()
        process.join(timeout=moments.uniform(0, whole_s))
        process.kill()
        process.join()
        if process.exitcode == 0:  # a busy machine makes the first measure too long
            whole_s = min(whole_s, time.monotonic() - started)
        num_killed += process.exitcode == -signal.SIGKILL
        if len(list(options.prepared_path.glob("*/manifest.json"))) == (preprocess_shards or 1):
            for folder in options.prepared_path.glob("*/"):  # done before it was killed: once more
                folder.rename(tmp_path / f"done-{time.monotonic_ns()}")
    again = prepare([entry], options)
    assert content_of(options.prepared_path) == content_of(undisturbed.prepared_path)
    assert again.fingerprint == prepare([entry], undisturbed).fingerprint


def test_a_holder_that_stopped_beating_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a job that waits for ever for a node that is gone, or one that replaces a holder which is alive.
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(lock, "STALE_S", 0.6)
    path = tmp_path / "a.lock"

    def hold() -> None:
        lock._machine_id = lambda: "another machine"
        with lock.exclusive(path, "test"):
            time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=hold)
    process.start()
    while not path.exists():
        time.sleep(0.01)
    started = time.monotonic()
    waiting = multiprocessing.get_context("fork").Process(target=_acquire_once, args=(path,))
    waiting.start()
    waiting.join(timeout=1.5)
    assert waiting.is_alive()  # the holder beats
    os.kill(process.pid or 0, signal.SIGSTOP)
    waiting.join(timeout=10)
    assert waiting.exitcode == 0
    assert time.monotonic() - started > 0.6
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_left_behind_what_was_published_goes_with_the_next_run(corpus: DatasetEntry, tmp_path: Path) -> None:
    # Catches a file for every process that was killed between publishing and letting go.
    options = PrepareOptions(bin_len=64, prepared_path=tmp_path / "prepared")
    prepare([corpus], options)
    [folder] = [path for path in options.prepared_path.iterdir() if path.is_dir()]
    left = options.prepared_path / f".{folder.name}.lock"
    process = multiprocessing.get_context("fork").Process(target=_die_holding, args=(left,))
    process.start()
    process.join()
    assert left.exists()
    prepare([corpus], options)
    assert not left.exists()


def _die_holding(path: Path) -> None:
    with lock.exclusive(path, "test"):
        os._exit(0)


def _acquire_once(path: Path) -> None:
    with lock.exclusive(path, "test"):
        pass


def test_a_source_that_fails_half_way_leaves_nothing(corpus: DatasetEntry, tmp_path: Path) -> None:
    # Catches the first half of a damaged file, published as if it were all of it.
    options = PrepareOptions(bin_len=64, prepared_path=tmp_path / "prepared")
    data = gzip.compress(Path(corpus.path).read_bytes())
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"rows.jsonl.gz"):
        prepare([DatasetEntry(str(path))], options)
    assert list(options.prepared_path.iterdir()) == []
    path.write_bytes(data)
    assert len(prepare([DatasetEntry(str(path))], options)) == 3000
