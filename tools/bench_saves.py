"""Times how long saves in the background stop training, beside torch.distributed.checkpoint's asynchronous saves.

    uv run tools/bench_saves.py                                                       # a tiny model, to test the tool
    uv run tools/bench_saves.py --shape qwen3-1.7b --num-tokens 8192 --accumulation 8 --folder FOLDER

Full weights and AdamW, all in fp32, one process. First steps without saves, then, twice, as many steps as asked with a
save after every tenth: by xorl and by torch. The older checkpoint is removed when a new one is complete. Prints a table
in Markdown. "Longest stop" is the largest difference between a step with a save, or the one after it, and the median
step without saves; "cost" compares all steps of a run with as many of that median.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

from xorl.ckpt import BackgroundWriter, Checkpointer
from xorl.ckpt.retention import Retention
from xorl.cli.bench_config import SHAPES
from xorl.config import Config, config_from_mapping
from xorl.core.loss import cross_entropy
from xorl.core.mesh import Mesh
from xorl.data import PackedBatch
from xorl.data.batch import Document, collate
from xorl.train.build import build_engine
from xorl.train.engine import Engine
from xorl.train.model_source import read_architecture
from xorl.train.startup import parallel_dims

WARMUP = 3


class Times(NamedTuple):
    """Seconds of each step and, of each save, until its checkpoint is complete."""

    steps: list[float]
    saves: list[float]


def config_of(folder: Path, *, recompute: bool) -> Config:
    """One process; parameters, gradients and optimizer states in fp32."""
    return config_from_mapping(
        {
            "model": {"config_path": str(folder)},
            "data": {"datasets": [{"path": "unused"}]},
            "train": {
                "output_dir": str(folder / "output"),
                "data_parallel_mode": "none",
                "enable_gradient_checkpointing": recompute,
                "max_grad_norm": 1.0,
            },
        }
    ).config


class ByXorl:
    """Saves of xorl."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._checkpointer = Checkpointer(folder, retention=Retention(last=1))
        self._background = BackgroundWriter()
        state = engine.state()
        self._background.reserve(
            {f"{name}.{key}": value for name, part in state.items() for key, value in part.state_dict().items()}
        )

    def save(self, step: int, on_saved: Callable[[], None]) -> None:
        """Start a save."""
        self._checkpointer.save(
            step, self._engine.state(), background=self._background, on_published=lambda path: on_saved()
        )

    def before_change(self) -> None:
        """Wait until the parameters may change."""
        self._background.before_change()

    def finish(self) -> None:
        """Wait for the last save, and free the memory."""
        self._background.finish()
        self._background.close()


class ByTorch:
    """Saves of torch, with its default stager; it has copied the state when it returns."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        self._writing: Future[object] | None = None
        self._older: Path | None = None
        self._path: Path | None = None

    def save(self, step: int, on_saved: Callable[[], None]) -> None:
        """Start a save."""
        self.finish()
        self._older, self._path = self._path, self._folder / f"step_{step}"
        state = {name: part.state_dict() for name, part in self._engine.state().items()}
        found = async_save(state, checkpoint_id=self._path)
        assert isinstance(found, Future)
        found.add_done_callback(lambda future: on_saved())
        self._writing = found

    def before_change(self) -> None:
        """Does nothing."""

    def finish(self) -> None:
        """Wait for the last save, and remove the one before."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None
        if self._older is not None:
            shutil.rmtree(self._older)


def run(engine: Engine, batches: list[PackedBatch], num_steps: int, saver: ByXorl | ByTorch | None) -> Times:
    """Train, and save after every tenth step."""
    times = Times([], [])
    for step in range(1, num_steps + 1):
        started = time.perf_counter()
        losses = engine.forward_backward(batches, cross_entropy)
        if saver is not None:
            saver.before_change()
        engine.optim_step(1e-5, losses.divisor)
        if saver is not None and step % 10 == 0:
            begun = time.perf_counter()
            saver.save(step, lambda begun=begun: times.saves.append(time.perf_counter() - begun))
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # not with the stream that copies
        times.steps.append(time.perf_counter() - started)
    if saver is not None:
        saver.finish()
    return times


def row(name: str, times: Times, usual: float) -> str:
    """A row of the table. usual: seconds of a step without saves."""
    stops = [first + second - 2 * usual for first, second in zip(times.steps[9::10], times.steps[10::10], strict=False)]
    cost = sum(times.steps) / (len(times.steps) * usual) - 1
    stop = f"{max(stops):.2f}" if stops else "-"
    until = f"{statistics.median(times.saves):.1f} | {max(times.saves):.1f}"
    return f"| {name} | {stop} | {100 * cost:.1f} % | {until} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--num-tokens", type=int, default=64, help="of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--torch-steps", type=int, help="default: as --steps")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--folder", type=Path, help="of the checkpoints; default: a temporary one")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        (folder / "config.json").write_text((SHAPES / f"{options.shape}.json").read_text())
        config = config_of(folder, recompute=options.recompute)
        architecture = read_architecture(config.model)
        engine = build_engine(config, architecture, Mesh(parallel_dims(config, 1), device.type), device)
        generator = torch.Generator().manual_seed(0)
        vocab, length = architecture.config.vocab_size, min(4096, options.num_tokens)
        documents = [
            Document(ids, ids)
            for ids in torch.randint(vocab, (options.num_tokens // length, length), generator=generator).numpy()
        ]
        batches = [collate(documents, pad_to_multiple_of=64)] * options.accumulation
        run(engine, batches, WARMUP, None)
        usual = statistics.median(run(engine, batches, 10, None).steps)
        state = [tensor for part in engine.state().values() for tensor in part.state_dict().values()]
        size = sum(tensor.numel() * tensor.element_size() for tensor in state if isinstance(tensor, torch.Tensor))
        print(f"{options.shape}: a checkpoint has {size / 1e9:.1f} GB; a step without saves takes {usual:.3f} s\n")
        print("| saves | longest stop, s | cost | until complete, s | at most, s |\n|---|---|---|---|---|")
        by_xorl = run(engine, batches, options.steps, ByXorl(engine, folder / "xorl"))
        print(row("xorl", by_xorl, usual), flush=True)
        shutil.rmtree(folder / "xorl")
        by_torch = run(engine, batches, options.torch_steps or options.steps, ByTorch(engine, folder / "torch"))
        print(row("torch.distributed.checkpoint", by_torch, usual), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
