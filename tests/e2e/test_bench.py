"""`xorl bench` from the command line to its record, on two ranks of a CPU."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from local_options import local_config
from tiny_models import hf_config, write_config
from tiny_runs import run_values, wait_for_step
from xorl.cli.bench_config import SHAPES
from xorl.config import config_from_mapping
from xorl.config.local import ModelConfig
from xorl.core.mesh import ParallelDims
from xorl.train import build_run, train
from xorl.train.bench.memory import memory_refusal
from xorl.train.model_source import read_architecture
from xorl.train.observe.observer import Metrics
from xorl.train.observe.timing import StepTimer


def test_a_shape_is_measured_beside_a_peer_on_two_ranks(tmp_path: Path) -> None:
    # Catches a bench that cannot start its ranks, peers that do not run where xorl does, and figures that are missing.
    flags = ["--seq", "64", "--steps", "2", "--warmup", "1", "--rounds", "1", "--profile"]
    peers = ["--peers", "transformers,transformers-liger,transformers-fa4", "--against", "train.param_dtype=fp32"]
    work = ["--nproc-per-node", "2", "--tokens-per-step", "256", *peers]
    output = ["--output", str(tmp_path / "out"), "--record", str(tmp_path / "record.md")]
    result = subprocess.run(
        [sys.executable, "-m", "xorl.cli.bench", "--model", "tiny", *flags, *work, *output, "--train.lr", "1e-3"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    record = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert list(record["systems"]) == ["xorl", "xorl train.param_dtype=fp32", "transformers"]
    assert "liger" in record["absent"]["transformers-liger"]
    assert "'flash_attention_4' cannot run here" in record["absent"]["transformers-fa4"]
    assert record["config"]["train"]["lr"] == 1e-3
    assert record["peers"] == "torch's fused AdamW, parameters in bf16, products in bf16"
    assert (record["work"]["num_ranks"], record["work"]["tokens_per_step"]) == (2, 256)
    for system in record["systems"].values():
        steps = system["rounds"][0]
        assert [step["step"] for step in steps] == [1, 2, 3]
        assert all(step["comm_s"] > 0 and 5 < step["loss"] < 8 for step in steps)
    assert record["ratios"]["transformers"]["ratio"] > 0
    assert record["kernels"]["kernels"]
    phases = record["command_to_first_step_s"]
    assert phases["total"] == sum(seconds for phase, seconds in phases.items() if phase != "total")
    assert {"process", "data", "join", "model", "first_step"} <= set(phases)
    assert not list((tmp_path / "out").rglob("global_step_*"))
    assert (tmp_path / "record.md").read_text().startswith("# Measured\n\n## tiny_64_single, ")


@pytest.mark.parametrize(("number", "num_ranks"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_signal_ends_all_of_it_and_nothing_is_written(number: signal.Signals, num_ranks: int, tmp_path: Path) -> None:
    """Catches a bench that saves a model when it is stopped, goes on with its next round, and records the cut one."""
    output = tmp_path / "out"
    flags = ["--model", "tiny", "--seq", "64", "--steps", "100000", "--warmup", "0", "--rounds", "2"]
    ranks = ["--nproc-per-node", str(num_ranks), "--tokens-per-step", "128"]
    process = subprocess.Popen(
        [sys.executable, "-m", "xorl.cli.bench", *flags, *ranks, "--output", str(output)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        wait_for_step(output / "runs" / "xorl_1", 5, process)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 128 + number, stderr
    assert f"interrupted by {number.name}" in stderr
    assert [path.name for path in (output / "runs").iterdir()] == ["xorl_1"]
    assert not {path.name for path in output.rglob("*")} & {"bench.json", "bench.md", "latest"}


def test_a_shape_that_cannot_fit_is_refused_with_the_numbers() -> None:
    # Catches a benchmark that fills the host's memory for minutes and is killed without a word.
    architecture = read_architecture(ModelConfig(config_path=str(SHAPES / "qwen3-8b.json")))
    gib = 2**30

    def refusal(has: int, sharing: int = 1, shard_size: int = 1, **options: object) -> str | None:
        config = local_config(SHAPES, **{"param_dtype": "bf16", **options})
        dims = ParallelDims(dp_shard=shard_size)
        return memory_refusal(config, architecture, dims, available_bytes=has, num_ranks=sharing, owner="this machine")

    # 8.19 billion parameters: 2 bytes each, as many for the gradient, and two moments.
    assert refusal(62 * gib) is None
    told = refusal(60 * gib)
    assert told is not None
    assert "take 61.0 GiB (param_dtype bf16, optimizer adamw), and this machine has 60.0 GiB" in told
    assert told.endswith("use a smaller shape, or --lora.enable_lora true")
    assert refusal(31 * gib, shard_size=2) is None
    assert "of 2 ranks take 61.0 GiB" in str(refusal(31 * gib, sharing=2, shard_size=2))
    assert refusal(20 * gib, lora={"enable_lora": True}, param_dtype=None) is None


class Recorder:
    """A sink that keeps which steps were reported."""

    def __init__(self) -> None:
        self.steps: list[object] = []

    def write(self, metrics: Metrics) -> None:
        self.steps.append(metrics["step"])

    def close(self) -> None:
        """Nothing to close."""


def test_the_last_step_is_reported_where_nothing_is_saved_after_it(tmp_path: Path) -> None:
    # Catches a benchmark on GPUs that lacks its last step: they report one when the next one is launched.
    write_config(tmp_path / "model", hf_config())
    dummy = {"datasets": [{"path": "dummy"}]}
    values = run_values(tmp_path, tmp_path / "run", data=dummy, max_steps=2, save_hf_weights=False)
    run = build_run(config_from_mapping(values).config)
    recorder, late = Recorder(), torch.device("meta")
    run.observer.device, run.observer.timer = late, StepTimer(late)
    run.observer.sinks.append(recorder)
    run.checkpoints.due = lambda step: False
    train(run)
    assert recorder.steps == [1, 2]
