"""How the launcher notices a process that runs but does not work, apart from what is in tests/e2e/server/test_hangs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xorl.config import server_config_from_mapping
from xorl.core.launched import store_in
from xorl.host.alive import AwakeClock
from xorl.host.processes import state_of
from xorl.server.hangs import Hang, HangWatch, silence_s
from xorl.server.supervise import Supervised

STUCK = """
import os, pathlib, signal, subprocess, sys, time
from xorl.host.alive import AliveFile

child = subprocess.Popen(["sleep", "60"], start_new_session=True)
child.send_signal(signal.SIGSTOP)
written = pathlib.Path(sys.argv[1], "written")
written.write_text(str(child.pid))
written.rename(pathlib.Path(sys.argv[1], "child"))
alive = AliveFile(pathlib.Path(sys.argv[1], "API"))

def stuck():
    time.sleep(60)

for _ in range(20):
    alive.touch()
    time.sleep(0.1)
stuck()
"""


def test_a_process_that_is_stuck_shows_where_and_is_replaced_with_what_it_started(tmp_path: Path, capfd) -> None:
    """Catches an API that accepts connections and answers none, and a stopped grandchild that is left behind."""
    process = Supervised("API", [sys.executable, "-c", STUCK, str(tmp_path)], hangs=HangWatch(tmp_path, ["API"], 1.0))
    process.start()
    begun = time.monotonic()
    while process.num_restarts == 0:
        process.kill_if_hung()
        process.restart_if_dead()
        assert time.monotonic() < begun + 30
        time.sleep(0.05)
        if process.hung_since is None and (tmp_path / "child").exists():
            child = int((tmp_path / "child").read_text())
    status = process.status
    process.kill()
    assert time.monotonic() - begun > 2.0, "it gave signs of life for so long"
    assert "API (process" in status.reason
    assert "runs (state S) without answering" in status.reason
    assert status.hung_since is not None
    assert "in stuck" in capfd.readouterr().err
    assert state_of(child) is None


def test_a_rank_that_waits_for_a_slower_one_is_alive_until_it_is_stopped(tmp_path: Path) -> None:
    """Catches a start that counts as a hang because the last rank is much slower, or a stop during it unnoticed."""
    limit_s = 3.0
    config = tmp_path / "server.yaml"
    config.write_text(f"model_path: m\noutput_dir: {tmp_path}\n")
    (signs := tmp_path / "signs").mkdir()
    arguments = ["--config", str(config), "--bind", f"ipc://{tmp_path}/socket", "--signs", str(signs)]
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", **store_in(tmp_path)}
    watch = HangWatch(signs, ["rank 0"], limit_s, takes_notice=True)
    watch.reset()
    rank = subprocess.Popen([sys.executable, "-m", "xorl.server.worker", *arguments], env=os.environ | ranks)

    def hang_within(seconds: float) -> Hang | None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (hang := watch.look(rank.pid)) is not None:
                return hang
            time.sleep(0.1)
        return None

    try:
        deadline = time.monotonic() + 120
        while not (signs / "rank 0").exists():
            assert rank.poll() is None
            assert time.monotonic() < deadline
            assert hang_within(0.1) is None
        assert hang_within(1.5 * limit_s) is None
        assert rank.poll() is None, "it waits for rank 1"
        rank.send_signal(signal.SIGSTOP)
        hang = hang_within(60)
        assert hang is not None
        assert "is stopped (state T)" in hang.reason
    finally:
        rank.kill()
        rank.wait()


def test_a_stopped_process_handles_the_signal_to_end(tmp_path: Path) -> None:
    """Catches a stop of the service that waits half an hour for a process that cannot hear it."""
    process = Supervised("API", [sys.executable, "-c", "import time; time.sleep(60)"])
    process.start()
    os.kill(process.pid, signal.SIGSTOP)
    process.signal(signal.SIGTERM)
    assert process.wait(10)


def test_time_in_which_the_watching_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a service that was suspended as a whole and kills itself once it may continue."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    clock = AwakeClock(max_gap_s=1.0)
    for gap_s, expected in ((0.5, 0.5), (3600.0, 1.5), (0.25, 1.75)):
        now += gap_s
        assert clock.now() == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 60.0),
        ({"worker_connection_timeout": 300}, 150.0),
        ({"worker_connection_timeout": 2}, 10.0),
        ({"worker_stall_timeout": 15}, 15.0),
        ({"worker_stall_timeout": None}, None),
    ],
)
def test_silent_processes_are_replaced_before_calls_fail_for_lack_of_workers(
    tmp_path: Path, options: dict[str, object], expected: float | None
) -> None:
    """Catches calls that fail since the workers were missed for so long that they count as gone."""
    config = server_config_from_mapping({"model_path": "m", "output_dir": str(tmp_path), **options}).config
    assert silence_s(config) == expected
