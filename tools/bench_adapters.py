"""Times training steps of many adapters mixed in one pass against steps of a single adapter on the same tokens.

    uv run tools/bench_adapters.py                    # on a GPU: Qwen3-8B's shape, 8,192 tokens, 16 adapters of rank 16
    uv run tools/bench_adapters.py --ranks 4 8 16 64  # adapters of these ranks in turn
    uv run tools/bench_adapters.py --dry-run          # anywhere: a tiny shape, no figures

A step is a forward pass, a backward pass, and the optimizer step of every adapter. The single adapter is in a model
built like that of `xorl train`; banks of one and of all adapters run as in a sweep or the service. Only one is built at
a time, because memory is measured as well; they alternate for `--rounds` rounds. Prints medians as a Markdown table.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from xorl.cli.bench_config import SHAPES, shapes
from xorl.config import Config, config_from_mapping
from xorl.config.entries import SweepMemberConfig
from xorl.core import runtime
from xorl.core.loss import LOSSES
from xorl.core.mesh import Mesh, ParallelDims
from xorl.data import PackedBatch
from xorl.data.batch import Document, collate
from xorl.lora import Adam, AdapterBank, AdapterSpec
from xorl.train.bank_engine import BankEngine, MixedBatch
from xorl.train.build import build_engine
from xorl.train.model import build_model
from xorl.train.model_source import read_architecture
from xorl.train.observe.timing import Clock

LR = 1e-5
WARM_UP = 3


@dataclass(frozen=True)
class Result:
    """Medians of one kind over all its steps; peak_gib is the peak memory of the device."""

    kind: str
    step_ms: float
    tokens_per_s: float
    peak_gib: float

    def row(self, single: Result) -> str:
        """A row of the table."""
        ratio = self.tokens_per_s / single.tokens_per_s
        return f"| {self.kind} | {self.step_ms:.1f} | {self.tokens_per_s:,.0f} | {ratio:.3f} | {self.peak_gib:.1f} |"


@dataclass(frozen=True)
class Work:
    """The measured work: a row of `num_tokens`, divided into one document per adapter."""

    config: Config
    num_tokens: int
    ranks: Sequence[int]
    mesh: Mesh
    device: torch.device

    def batches(self) -> list[PackedBatch]:
        """One document per adapter, `num_tokens` in total."""
        generator = torch.Generator().manual_seed(0)
        vocab_size = read_architecture(self.config.model).config.vocab_size
        lengths = [len(part) for part in torch.arange(self.num_tokens).tensor_split(len(self.ranks))]
        rows = [torch.randint(vocab_size, (length,), generator=generator).numpy() for length in lengths]
        return [collate([Document(row, row)]) for row in rows]


def single(work: Work) -> Callable[[], None]:
    """Steps of a model with one adapter, which has the first rank."""
    architecture = read_architecture(work.config.model)
    engine = build_engine(work.config, architecture, work.mesh, work.device)
    batch = MixedBatch.of([("one", own) for own in work.batches()]).batch

    def step() -> None:
        losses = engine.forward_backward([batch], LOSSES["cross_entropy"])
        engine.optim_step(LR, losses.num_trained_tokens)

    return step


def banked(work: Work, ranks: Sequence[int]) -> Callable[[], None]:
    """Steps of a bank of adapters of these ranks, which share the tokens."""
    config, architecture = work.config, read_architecture(work.config.model)
    # As in a sweep: a frozen base without adapters.
    lora = config.lora.model_copy(update={"sweep": [SweepMemberConfig(name="adapter")]})
    model = build_model(architecture, config.model, config.train, lora, work.mesh, work.device)
    bank = AdapterBank(
        model.module,
        targets=architecture.spec.adapter_targets,
        num_resident=len(ranks),
        max_rank=max(ranks),
        device=work.device,
        group=work.mesh.loss.group,
    )
    names = [f"adapter{index}" for index in range(len(ranks))]
    for name, rank in zip(names, ranks, strict=True):
        bank.add(name, AdapterSpec(rank=rank, targets=architecture.spec.adapter_targets))
    engine = BankEngine(model, bank, work.device, flops=lambda name, lengths: 0.0)
    if len(ranks) == 1:
        mixed = MixedBatch.of([(names[0], MixedBatch.of([(names[0], own) for own in work.batches()]).batch)])
    else:
        mixed = MixedBatch.of(list(zip(names, work.batches(), strict=True)))
    adam = Adam(lr=LR)

    def step() -> None:
        losses = engine.forward_backward([mixed], LOSSES["cross_entropy"], names)
        for name in names:
            engine.optim_step(name, adam, losses[name].num_trained_tokens, 1.0)

    return step


def measure(make: Callable[[], Callable[[], None]], num_steps: int, device: torch.device) -> tuple[list[float], float]:
    """Returns (seconds of each step, peak memory in GiB) of what `make` builds, which is freed afterwards."""
    on_gpu = device.type == "cuda"
    step = make()
    for _ in range(WARM_UP if on_gpu else 1):
        step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(device)
    moments = [clock.now()]
    for _ in range(num_steps):
        # As in training, the host may run ahead of the device.
        step()
        moments.append(clock.now())
    clock.wait(moments[-1])
    times = [clock.seconds(begin, end) for begin, end in pairwise(moments)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    del step
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return times, peak


def config_of(model: str, folder: Path, rank: int, *, on_gpu: bool, recompute: bool) -> Config:
    """A run with one adapter on all linear layers of a shape with random weights."""
    (folder / "config.json").write_text((SHAPES / f"{model}.json").read_text())
    return config_from_mapping(
        {
            "model": {"config_path": str(folder)},
            "data": {"datasets": [{"path": "dummy"}]},
            "train": {
                "output_dir": str(folder),
                "data_parallel_mode": "none",
                "enable_mixed_precision": True,
                "enable_gradient_checkpointing": recompute,
                "enable_compile": on_gpu,
                "lr": LR,
                "use_wandb": False,
            },
            "lora": {"enable_lora": True, "lora_rank": rank},
        }
    ).config


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", choices=shapes())
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16], help="ranks of the adapters, used cyclically")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--output", type=Path, help="JSON file for all results")
    options = parser.parse_args(arguments)
    if options.dry_run:
        options.model, options.tokens, options.steps, options.rounds = "tiny", 8 * options.adapters, 1, 1
    ranks = [options.ranks[index % len(options.ranks)] for index in range(options.adapters)]
    place = runtime.init()
    mesh = Mesh(ParallelDims.resolve("none", place.world_size, shard_size=-1, replicate_size=1), place.device.type)
    with tempfile.TemporaryDirectory() as name:
        on_gpu = place.device.type == "cuda"
        config = config_of(options.model, Path(name), ranks[0], on_gpu=on_gpu, recompute=options.recompute)
        work = Work(config, options.tokens, ranks, mesh, place.device)
        kinds: dict[str, Callable[[], Callable[[], None]]] = {
            "one adapter": lambda: single(work),
            "bank of one": lambda: banked(work, ranks[:1]),
            f"bank of {len(ranks)}, mixed": lambda: banked(work, ranks),
        }
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        peaks: dict[str, float] = dict.fromkeys(kinds, 0.0)
        for _ in range(options.rounds):
            for kind, make in kinds.items():
                found, peak = measure(make, options.steps, place.device)
                times[kind] += found
                peaks[kind] = max(peaks[kind], peak)
    results = [
        Result(kind, 1e3 * (median := statistics.median(found)), options.tokens / median, peaks[kind])
        for kind, found in times.items()
    ]
    print("| step of | ms | tokens/s | of one adapter | peak GiB |")
    print("|---|---|---|---|---|")
    for result in results:
        print(result.row(results[0]))
    if options.output is not None:
        record = {"options": {**vars(options), "output": None}, "ranks": ranks, "times": times, "peaks": peaks}
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
