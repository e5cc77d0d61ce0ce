"""What a run on a GPU reports of its speed is what a clock on the wall says."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from tiny_models import hf_config, write_config
from xorl.config import config_from_mapping
from xorl.core import runtime
from xorl.data import PackedBatch, StepLoader
from xorl.train import build_run, train
from xorl.train.observe.devices import peak_flops

pytestmark = pytest.mark.gpu

# Steps of about 0.1 s on a Hopper: long beside what the host does between them.
MODEL = hf_config(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    initializer_range=0.02,
)
PARTS = ("forward_s", "backward_s", "comm_s", "optimizer_s", "idle_s")


def mapping(folder: Path) -> dict[str, dict[str, object]]:
    write_config(folder, MODEL)
    return {
        "model": {"config_path": str(folder)},
        "data": {
            "datasets": [{"path": "dummy"}],
            "sample_packing_sequence_len": 8192,
            "val_set_size": 8,
            "dataloader_num_workers": 0,
            "dataset_prepared_path": str(folder / "prepared"),
        },
        "train": {
            "output_dir": str(folder / "output"),
            "max_steps": 8,
            "eval_steps": 3,
            "save_steps": 5,
            "save_hf_weights": False,
            "use_wandb": False,
            "enable_gradient_checkpointing": False,
            "gradient_accumulation_steps": 2,
            "log_format": "structured",
        },
    }


class Stamped:
    """A loader, and an engine's optimizer step, between which the wall clock is read with the GPU at rest."""

    def __init__(self, loader: StepLoader) -> None:
        self._loader = loader
        self.starts: list[float] = []
        self.ends: list[float] = []

    def steps(self, start: int = 0) -> Iterator[tuple[int, list[PackedBatch]]]:
        for item in self._loader.steps(start):
            torch.cuda.synchronize()
            self.starts.append(time.perf_counter())
            yield item

    def end(self) -> None:
        torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def test_every_step_is_timed_as_the_wall_clock_times_it(tmp_path: Path) -> None:
    # Catches events read before they came, a step that takes in the pause of a save or an evaluation, and rates of the
    # first step, the last one, or the one before an evaluation that are those of another.
    run = build_run(config_from_mapping(mapping(tmp_path)).config)
    stamped = Stamped(run.loader)
    optim_step = run.engine.optim_step

    def stamped_optim_step(lr: float, divisor: torch.Tensor | float) -> object:
        update = optim_step(lr, divisor)
        stamped.end()
        return update

    run.engine.optim_step = stamped_optim_step  # pyright: ignore[reportAttributeAccessIssue]
    peak = peak_flops(run.startup.runtime.device)
    train(replace(run, loader=cast(StepLoader, stamped)))
    run.observer.close()
    lines = [json.loads(line) for line in (tmp_path / "output" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time_s" in line]
    assert [step["step"] for step in steps] == list(range(1, 9))
    for step, start, end in list(zip(steps, stamped.starts, stamped.ends, strict=True))[1:]:
        assert step["time_s"] == pytest.approx(end - start, rel=0.05), step
        assert step["tokens_per_s"] == pytest.approx(step["num_tokens"] / (end - start), rel=0.05), step
        assert sum(step[part] for part in PARTS) == pytest.approx(step["time_s"], rel=1e-3), step
        assert min(step[part] for part in PARTS) >= -1e-4, step
        assert step["idle_s"] < 0.2 * step["time_s"], step
        if peak is not None:
            flops = step["mfu"] * step["time_s"] * peak
            assert flops == pytest.approx(steps[1]["mfu"] * steps[1]["time_s"] * peak, rel=1e-3), "equal work"
    assert [step["step"] for step in steps if step["checkpoint_s"] > 0] == [6]
    runtime.shutdown()


@pytest.mark.parametrize("mode", ["fsdp2", "ddp"])
def test_exposed_communication_of_two_gpus_is_part_of_the_step(mode: str, tmp_path: Path, two_gpus) -> None:
    # Catches waits recorded on the wrong stream, which come out negative or longer than the step.
    (tmp_path / "config.yaml").write_text(json.dumps(mapping(tmp_path)))
    command = [sys.executable, "-m", "xorl.cli.train", str(tmp_path / "config.yaml"), "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, "--train.data_parallel_mode", mode], capture_output=True, text=True, timeout=400, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "output" / "metrics.jsonl").read_text().splitlines()]
    for step in [line for line in lines if "time_s" in line][1:]:
        assert 0 < step["comm_s"] < step["time_s"], step
        assert min(step[part] for part in PARTS) >= -1e-3, step
        assert sum(step[part] for part in PARTS) == pytest.approx(step["time_s"], rel=1e-3), step
