"""The watchdog: a job that hangs ends with the stacks of all ranks and the name of the one that the others wait for."""

from __future__ import annotations

import os
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
    folder: Path, rank_code: Callable[[int, Watchdog], object], *, stall_s: float = 60.0, lost_s: float = 60.0
) -> Callable[[], None]:
    """Returns the code of a rank that is watched, and writes why the watchdog ended it."""

    def run() -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()

        def end(error: Exception) -> None:
            (folder / f"ended_{rank}").write_text(f"{type(error).__name__}: {error}")
            os._exit(0)

        watchdog = Watchdog(end, stall_s=stall_s, lost_s=lost_s, interval_s=0.1)
        places = tuple(join.Place(other, f"host-{other}", str(other), f"10.0.0.{other}") for other in range(num_ranks))
        peers = join.Peers(dist.distributed_c10d._get_default_store(), places)
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
