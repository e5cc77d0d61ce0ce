"""The command on two ranks with everything that observes a run switched on; and a run that is asked to stop."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_runs import metrics_of, wait_for_step, write_quickstart_run


def start(folder: Path, steps: int, *arguments: str) -> subprocess.Popen[str]:
    options = {"max_steps": steps, "lr": 1e-3, "load_checkpoint_path": "auto"}
    config = write_quickstart_run(folder, data={"val_set_size": 0.2}, **options)
    command = [sys.executable, "-m", "xorl.cli.train", str(config), *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "WANDB_API_KEY": ""})


def stopped(folder: Path, number: int, *arguments: str) -> str:
    """What a run says that gets a signal after its first steps, saves, and ends with the signal's exit code."""
    many = 100_000
    process = start(folder, many, *arguments)
    wait_for_step(folder / "output", 6, process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 128 + number, stderr
    last = max(record["step"] for record in metrics_of(folder / "output"))
    assert (folder / "output" / "checkpoints" / "latest").read_text().strip() == f"global_step_{last}"
    assert last < many
    return stderr


@pytest.mark.multi
def test_a_run_that_is_interrupted_saves(tmp_path: Path) -> None:
    # Catches work that is lost to Ctrl-C, and a single evaluation that is shown as a change.
    stderr = stopped(tmp_path, signal.SIGINT, "--nproc-per-node", "1")
    assert re.search(r"held out    loss [0-9.]+, tokens right", stderr), stderr


@pytest.mark.multi
def test_two_ranks_with_every_observer_save_when_they_are_terminated(tmp_path: Path) -> None:
    # Catches work that is lost to a scheduler that takes the machine back, and a sink that only some runs have: wandb
    # without a key, the profiler, evaluations between steps.
    observers = ["--train.use_wandb", "true", "--train.wandb_tags", "[a, b]", "--train.enable_profiling", "true"]
    folders = ["--train.profile_trace_dir", str(tmp_path / "trace")]
    ranks = ["--nproc-per-node", "2", "--train.eval_steps", "2"]
    stderr = stopped(tmp_path, signal.SIGTERM, *ranks, *observers, *folders)
    assert "torchrun" in stderr
    assert "wandb=offline" in stderr
    assert list((tmp_path / "output" / "wandb").glob("offline-run-*"))
    assert [file.name for file in (tmp_path / "trace").iterdir()] == ["rank0_step_1.json.gz"]
    records = metrics_of(tmp_path / "output")
    steps = [record["step"] for record in records if "loss" in record]
    assert steps == list(range(1, len(steps) + 1))
    assert [record["step"] for record in records if "eval_loss" in record][:3] == [0, 2, 4]
    assert all(record["loss"] > 0 and record["grad_norm"] > 0 for record in records if "loss" in record)
