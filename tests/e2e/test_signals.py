"""A run that is told to stop in each of its phases: it ends with the documented code, and the command continues it."""

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tiny_runs import metrics_of, write_quickstart_run
from xorl.host.processes import state_of
from xorl.train import build, startup
from xorl.train.deadline import Deadline
from xorl.train.engine import Engine
from xorl.train.saves import Saves
from xorl.train.watchdog import Watchdog


def signalled(owner: object, name: str, nth: int, number: int) -> Callable[[], None]:
    """Returns a function after whose call this process receives a signal when it calls `owner.name` the nth time."""

    def prepare() -> None:
        function, calls = getattr(owner, name), []

        def call(*arguments: object, **options: object) -> object:
            calls.append(name)
            if len(calls) == nth:
                os.kill(os.getpid(), number)
            return function(*arguments, **options)

        setattr(owner, name, call)

    return prepare


def told(folder: Path) -> list[tuple[object, ...]]:
    """The losses of all steps and evaluations."""
    lines = metrics_of(folder / "output")
    return sorted((line["step"], "eval_loss" in line, line.get("loss"), line.get("eval_loss")) for line in lines)


@pytest.fixture(scope="module")
def whole() -> dict[str, list[tuple[object, ...]]]:
    """The results of the run that nobody stops, once there are any."""
    return {}


@pytest.mark.parametrize(
    ("owner", "name", "nth", "number", "saved"),
    [
        (startup, "prepare_data", 1, signal.SIGTERM, None),
        (build, "build_model", 1, signal.SIGUSR1, None),
        (Engine, "forward_backward", 1, signal.SIGUSR1, 2),
        (Saves, "save", 1, signal.SIGTERM, 2),
        (startup, "evaluate", 2, signal.SIGTERM, 2),
    ],
    ids=["data", "load", "forward", "save", "evaluation"],
)
def test_a_signal_in_any_phase_loses_nothing(
    owner: object, name: str, nth: int, number: int, saved: int | None, tmp_path: Path, run_command, whole
) -> None:
    # Catches a phase in which a signal is not heard, loses steps, or leaves what the same command cannot continue.
    if not whole:
        whole["results"] = run_to_the_end(tmp_path / "whole", run_command)
    folder = tmp_path / "stopped"
    ended = run_command(*config_in(folder), prepare=signalled(owner, name, nth, number))
    assert ended.returncode == 128 + number, ended.stderr
    latest = folder / "output" / "checkpoints" / "latest"
    assert (latest.read_text().strip() if latest.exists() else None) == (saved and f"global_step_{saved}")
    assert run_to_the_end(folder, run_command) == whole["results"]


def test_a_run_saves_before_max_time(tmp_path: Path, run_command) -> None:
    # Catches a run that its scheduler kills between two saves.
    arguments = ["--train.max_steps", "100000", "--train.save_steps", "0", "--train.max_time", "6"]
    ended = run_command(*config_in(tmp_path), *arguments)
    assert ended.returncode == 142, ended.stderr
    assert "stopped by train.max_time: continue with" in ended.stderr
    steps = [line[0] for line in told(tmp_path)]
    assert (tmp_path / "output" / "checkpoints" / "latest").read_text().strip() == f"global_step_{max(steps)}"


def test_a_run_that_hangs_ends_with_its_exit_code(tmp_path: Path, run_command) -> None:
    # Catches a watchdog that no run starts, and one whose report nobody prints.
    def hang(*_: object) -> None:
        time.sleep(60)

    def prepare() -> None:
        Watchdog.__init__.__kwdefaults__.update(stall_s=1.0, interval_s=0.2)
        Engine.forward_backward = hang

    ended = run_command(*config_in(tmp_path), prepare=prepare)
    assert ended.returncode == 5, ended.stderr
    assert "error: no rank has made progress for 1 s\nrank 0: step 1, forward and backward\n" in ended.stderr
    assert "in hang" in ended.stderr


def test_a_loader_process_that_is_stopped_is_named_and_not_left_behind(tmp_path: Path, run_command) -> None:
    # Catches a run that ends and leaves a stopped process, which notices nothing.
    forward_backward = Engine.forward_backward

    def stop_loader(*arguments: object) -> object:
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGSTOP)
        return forward_backward(*arguments)

    def prepare() -> None:
        Watchdog.__init__.__kwdefaults__.update(stall_s=2.0, interval_s=0.2)
        Engine.forward_backward = stop_loader

    ended = run_command(*config_in(tmp_path), "--train.max_steps", "50", prepare=prepare)
    assert ended.returncode == 5, ended.stderr
    found = re.search(r"\nchild process (\d+) is stopped", ended.stderr)
    assert found is not None, ended.stderr
    deadline = time.monotonic() + 10  # a killed process takes a moment to end
    while (state := state_of(int(found[1]))) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert state is None


def test_a_deadline_leaves_room_for_two_steps_and_a_save() -> None:
    # Catches a save that begins in time and does not end in time.
    now = [10.0]
    deadline = Deadline(100.0, lambda: 20.0, lambda: now[0])
    due = []
    for seconds in (2.0, 8.0, 2.0, 2.0, 39.0, 1.0, 1.0):
        now[0] += seconds
        due.append((now[0], deadline.is_due()))
    assert [at for at, is_due in due if is_due] == [63.0, 64.0, 65.0]


def config_in(folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    every_second = {"save_steps": 2, "eval_steps": 2, "save_hf_weights": False, "load_checkpoint_path": "auto"}
    return [str(write_quickstart_run(folder, data={"val_set_size": 0.2}, max_steps=4, lr=1e-3, **every_second))]


def run_to_the_end(folder: Path, run_command) -> list[tuple[object, ...]]:
    ended = run_command(*config_in(folder))
    assert ended.returncode == 0, ended.stderr
    return told(folder)
