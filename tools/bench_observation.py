"""Measures the overhead of observing training steps: phase marks, waits for collectives, and metrics.

    uv run tools/bench_observation.py                                     # on a GPU: Qwen3-8B's shape, 8,192 tokens
    uv run torchrun --nproc-per-node 2 tools/bench_observation.py         # under FSDP2, whose waits are marked as well
    uv run tools/bench_observation.py --dry-run                           # anywhere: a tiny shape, no figures

Runs alternating blocks of steps on the same batches in one build, measured in wall time between device
synchronizations. Observed steps do the same as those of the training loop, including metrics.jsonl. Prints a Markdown
table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from xorl.cli.bench_config import SyntheticRun, fixed_overrides, shapes, write_config
from xorl.config import load_config
from xorl.core import runtime
from xorl.train.build import build_run
from xorl.train.loop import Run
from xorl.train.observe.timing import Phase, StepTimer

WARM_UP = 3


class SwitchedTimer(StepTimer):
    """A StepTimer that can be switched off."""

    is_on = True

    def start(self) -> None:
        if self.is_on:
            super().start()

    def mark(self, phase: Phase) -> None:
        if self.is_on:
            super().mark(phase)

    def begin_wait(self) -> None:
        if self.is_on:
            super().begin_wait()

    def end_wait(self) -> None:
        if self.is_on:
            super().end_wait()


def block(run: Run, timer: SwitchedTimer, num_steps: int, *, observed: bool) -> float:
    """Seconds per step of a block of steps on the batches of the first step."""
    engine, observer = run.engine, run.observer
    _, batches = next(iter(run.loader.steps()))
    timer.is_on = observed
    _wait_for_gpu()
    begin = time.perf_counter()
    observer.start()
    for step in range(1, num_steps + 1):
        losses = engine.forward_backward(batches, run.loss_fn)
        update = engine.optim_step(1e-5, divisor=losses.num_trained_tokens.clamp(min=1))
        if observed:
            observer.step(step, losses, update, lr=1e-5)
    if observed:
        observer.flush()
    _wait_for_gpu()
    return (time.perf_counter() - begin) / num_steps


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", choices=shapes())
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10, help="steps per block")
    parser.add_argument("--rounds", type=int, default=4, help="blocks of each kind, alternating")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    if options.dry_run:
        options.model, options.tokens, options.steps, options.rounds = "tiny", 64, 2, 1
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as name:
        work = SyntheticRun(options.model, options.tokens, "single", 1, None, runtime.world_size(), 1, on_gpu)
        path = write_config(work, Path(name))
        overrides = [*fixed_overrides(1), "--data.dataloader_num_workers=0", f"--train.output_dir={name}"]
        run = build_run(load_config(path, overrides).config)
        timer = run.engine.timer
        timer.__class__ = SwitchedTimer  # in place, because the model's hooks already refer to it
        assert isinstance(timer, SwitchedTimer)
        block(run, timer, WARM_UP, observed=True)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(options.rounds):
            for observed, found in seconds.items():
                found.append(block(run, timer, options.steps, observed=observed))
        run.observer.close()
        is_main = run.startup.runtime.is_main
        runtime.shutdown()
    if is_main:
        plain, observed = (1e3 * statistics.median(found) for found in seconds.values())
        print("| steps | ms | cost |\n|---|---|---|")
        print(f"| alone | {plain:.2f} | |\n| observed | {observed:.2f} | {observed / plain - 1:+.2%} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
