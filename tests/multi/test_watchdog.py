"""The watchdog: a job that hangs ends with the stacks of all ranks and the name of the one that the others wait for."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from xorl.core import join
from xorl.host.failures import LostRankError, StalledError
from xorl.train.watchdog import Report, Watchdog, awaited

AT = Report(beat=1, phase="data", step=3, moves=9, collectives=20)


def watched(
    folder: Path,
    rank_code: Callable[[int, Watchdog], object],
    *,
    stall_s: float = 60.0,
    lost_s: float = 60.0,
    is_one_host: bool = False,
) -> Callable[[], None]:
    """Returns the code of a rank that is watched, and writes why the watchdog ended it."""

    def run() -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()

        def end(error: Exception) -> None:
            (folder / f"ended_{rank}").write_text(f"{type(error).__name__}: {error}")
            os._exit(0)

        watchdog = Watchdog(end, stall_s=stall_s, lost_s=lost_s, interval_s=0.1)
        network = "one" if is_one_host else "{}"
        locations = tuple(
            join.Location(other, f"host-{other}", network.format(other), f"10.0.0.{other}")
            for other in range(num_ranks)
        )
        peers = join.Peers(dist.distributed_c10d._get_default_store(), locations)
        watchdog.start(peers if num_ranks > 1 else None, rank)
        watchdog.position.move("data", 3)
        try:
            with watchdog.explaining():
                rank_code(rank, watchdog)
        except (LostRankError, StalledError) as error:
            end(error)

    return run


def read_slowly() -> None:
    time.sleep(60)


def test_a_stall_names_the_rank_that_the_others_wait_for(tmp_path: Path, run_ranks) -> None:
    # Catches a hang that names no rank, and ranks that end before their stacks are known.
    def rank_code(rank: int, _: Watchdog) -> None:
        dist.all_reduce(torch.zeros(1))
        if rank == 1:
            read_slowly()
        dist.all_reduce(torch.zeros(1))

    run_ranks(watched(tmp_path, rank_code, stall_s=1.0), 3)
    [text] = {(tmp_path / f"ended_{rank}").read_text() for rank in range(3)}
    assert text.startswith("StalledError: no rank has made progress for 1 s\n")
    name = "rank 1 on host host-1 (10.0.0.1)"
    assert f"the others wait for {name}\n{name}: step 3, data\n" in text
    assert "in read_slowly" in text.partition("\nrank 1:\n")[2]
    assert "in all_reduce" in text.partition("\nranks 0, 2:\n")[2]


def test_no_thread_is_left_once_the_watch_has_ended() -> None:
    # Catches a thread that is in an operation of the store when the interpreter ends, which aborts the process.
    watchdog = Watchdog(lambda error: None, interval_s=1e-4)
    watchdog.start(None, 0)
    time.sleep(0.05)
    watchdog.stop()
    assert "xorl-watchdog" not in {thread.name for thread in threading.enumerate()}


def test_a_stall_of_a_single_process_says_where_it_is(tmp_path: Path, run_ranks) -> None:
    # Catches a loader that hangs without anyone who says so.
    run_ranks(watched(tmp_path, lambda rank, _: read_slowly(), stall_s=1.0), 1)
    text = (tmp_path / "ended_0").read_text()
    assert text.startswith("StalledError: no rank has made progress for 1 s\nrank 0: step 3, data\n\nrank 0:\n")
    assert "in read_slowly" in text


def test_a_rank_without_a_sign_of_life_is_named(tmp_path: Path, run_ranks, monkeypatch) -> None:
    # Catches a host that vanished without closing its connections, for which the others wait half an hour.
    monkeypatch.setattr("xorl.train.watchdog.GRACE_S", 0.1)

    def rank_code(rank: int, watchdog: Watchdog) -> None:
        if rank == 1:
            time.sleep(0.5)
            watchdog.stop()
            while not (tmp_path / "ended_0").exists():
                time.sleep(0.05)
            os._exit(0)
        dist.all_reduce(torch.zeros(1))

    run_ranks(watched(tmp_path, rank_code, lost_s=1.0), 2)
    lost = "LostRankError: rank 1 on host host-1 (10.0.0.1): no sign of life for 1 s, last at step 3, data"
    assert (tmp_path / "ended_0").read_text().startswith(lost)


def stop_for(seconds: float, *pids: int) -> None:
    """Stop processes, which may include this one, and continue them later."""
    listed = " ".join(map(str, pids))
    command = f"kill -STOP {listed}; sleep {seconds}; kill -CONT {listed}"
    subprocess.run(["sh", "-c", command], check=True, start_new_session=True)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_is_named_with_its_state(stopped: int, tmp_path: Path, run_ranks, monkeypatch) -> None:
    # Catches a stopped process for which the others wait, and a report that blames its host.
    monkeypatch.setattr("xorl.train.watchdog.GRACE_S", 0.1)

    def rank_code(rank: int, _: Watchdog) -> None:
        dist.all_reduce(torch.zeros(1))
        if rank == stopped:
            time.sleep(0.5)
            stop_for(4.0, os.getpid())
        dist.all_reduce(torch.zeros(1))

    run_ranks(watched(tmp_path, rank_code, lost_s=1.0, is_one_host=True), 2)
    text = (tmp_path / f"ended_{1 - stopped}").read_text()
    assert text.startswith(f"LostRankError: rank {stopped} on host host-{stopped} (10.0.0.{stopped})")
    assert "is stopped (state T): it got SIGSTOP" in text


def test_a_job_that_is_stopped_as_a_whole_goes_on_where_it_was(tmp_path: Path, run_ranks) -> None:
    # Catches a job that a scheduler has suspended, which ends once it may continue since all were silent so long.
    def rank_code(rank: int, _: Watchdog) -> None:
        pids = torch.zeros(2, dtype=torch.int64)
        pids[rank] = os.getpid()
        dist.all_reduce(pids)
        time.sleep(0.5)
        if rank == 0:
            stop_for(3.0, *pids.tolist())
        dist.all_reduce(torch.zeros(1))
        time.sleep(0.5)

    run_ranks(watched(tmp_path, rank_code, lost_s=1.0, stall_s=2.0), 2)
    assert not list(tmp_path.glob("ended_*"))


def test_a_stall_names_a_child_process_that_is_stopped(tmp_path: Path, run_ranks) -> None:
    # Catches a loader's stopped process, of which the report of its rank says nothing.
    def rank_code(rank: int, _: Watchdog) -> None:
        child = subprocess.Popen(["sleep", "60"])
        os.kill(child.pid, signal.SIGSTOP)
        (tmp_path / "child").write_text(str(child.pid))
        child.wait()

    run_ranks(watched(tmp_path, rank_code, stall_s=1.0), 1)
    child = int((tmp_path / "child").read_text())
    os.kill(child, signal.SIGKILL)
    assert f"\nchild process {child} is stopped (state T)" in (tmp_path / "ended_0").read_text()


def test_a_rank_that_reads_a_large_file_makes_progress(tmp_path: Path, run_ranks) -> None:
    # Catches a save or a load that takes longer than the limit, and is taken for a hang.
    (tmp_path / "large").write_bytes(bytes(2**20))

    def rank_code(rank: int, _: Watchdog) -> None:
        for _ in range(10):
            (tmp_path / "large").read_bytes()
            time.sleep(0.3)

    run_ranks(watched(tmp_path, rank_code, stall_s=1.0), 1)
    assert not (tmp_path / "ended_0").exists()


def test_a_lost_connection_names_its_host(tmp_path: Path, run_ranks, monkeypatch) -> None:
    # Catches a bare traceback of gloo where a rank was killed.
    monkeypatch.setattr("xorl.train.watchdog.GRACE_S", 0.5)

    def rank_code(rank: int, _: Watchdog) -> None:
        if rank == 1:
            os._exit(0)
        dist.all_reduce(torch.zeros(1))

    run_ranks(watched(tmp_path, rank_code), 2)
    assert "that host, its network or one of these processes ended" in (tmp_path / "ended_0").read_text()


@pytest.mark.parametrize(
    ("reports", "answered", "expected"),
    [
        ({0: AT, 1: replace(AT, collectives=19)}, {0, 1}, [1]),
        ({0: AT, 1: replace(AT, moves=8)}, {0, 1}, [1]),
        ({0: replace(AT, collectives=19), 1: AT}, {0}, [1]),
        ({0: AT, 1: AT}, {0, 1}, []),
    ],
)
def test_who_is_waited_for(reports: dict[int, Report], answered: set[int], expected: list[int]) -> None:
    # Catches a rank that waits being blamed for the one that is late.
    assert awaited(reports, answered) == expected
