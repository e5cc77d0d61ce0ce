"""What `xorl train` listens on, and what somebody does there who wants to run code."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from listening import listeners, poison
from ports import free_port
from tiny_runs import last_step, wait_for_step, write_quickstart_run
from xorl.train.watchdog import INTERVAL_S

LIMIT_S = 120.0

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a launcher of `xorl train` with the given flags; what is left of it ends with the test."""
    started: list[subprocess.Popen[str]] = []
    config = write_quickstart_run(tmp_path, max_steps=1_000_000, save_epochs=0, save_steps=0, save_hf_weights=False)

    def start(*flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "xorl.cli.train", str(config), *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        environment.pop("GLOO_SOCKET_IFNAME", None)
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for_more_steps(folder: Path, *launchers: subprocess.Popen[str]) -> None:
    wait_for_step(folder / "output", last_step(folder / "output") + 3, *launchers)


@pytest.mark.multi
def test_ranks_of_one_host_keep_to_themselves(tmp_path: Path, start: Start) -> None:
    # Catches a run that opens a port to other machines, and one that unpickles what somebody writes to a port.
    launcher = start("--nproc-per-node", "2")
    wait_for_more_steps(tmp_path, launcher)
    found = listeners([launcher.pid])
    assert found  # gloo's
    assert launcher.pid not in {each.pid for each in found}
    assert [each for each in found if not each.is_loopback] == []
    assert poison(found, tmp_path / "run") == []
    wait_for_more_steps(tmp_path, launcher)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(LIMIT_S) == 143, launcher.communicate()[1]
    assert not (tmp_path / "run").exists()


@pytest.mark.multi
def test_the_store_of_several_hosts_listens_on_one_interface_and_unpickles_nothing(
    tmp_path: Path, start: Start
) -> None:
    # Catches a store that other networks reach, and a launcher or rank that unpickles what is in it.
    port = free_port()
    flags = ("--nproc-per-node", "1", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
    launchers = [start(*flags, "--node-rank", str(node)) for node in (0, 1)]
    wait_for_more_steps(tmp_path, *launchers)
    found = listeners(launcher.pid for launcher in launchers)
    assert [(each.address, each.port) for each in found if each.pid == launchers[0].pid] == [("127.0.0.1", port)]
    assert [each for each in found if not each.is_loopback] == []
    assert poison(found, tmp_path / "run") == [("127.0.0.1", port)]
    time.sleep(INTERVAL_S + 1.0)  # the watchdog has read it
    for launcher in launchers:
        launcher.send_signal(signal.SIGTERM)
    assert all(launcher.wait(LIMIT_S) != 0 for launcher in launchers)
    assert not (tmp_path / "run").exists()
