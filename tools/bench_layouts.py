"""Trains one model in several layouts of the same ranks, and compares losses, gradient norms and tokens/s.

    uv run tools/bench_layouts.py                                                       # two CPU ranks, a minute
    python tools/bench_layouts.py --shape qwen3-8b --ranks 2 --seq 16384 --tokens-per-step 131072 --recompute
    python tools/bench_layouts.py --shape qwen3-30b-a3b-12-layers --ranks 2 --seq 4096 --tokens-per-step 65536
    python tools/bench_layouts.py --shape qwen3-30b-a3b-12-layers --ranks 2 --steps 50 --mixed --compile \
        --param-dtype bf16 --layouts "ep 2, ddp" "ep 2, ddp, CUDA graphs"

All layouts train on the same batches: documents that each repeat a cycle of tokens, so that the losses fall. FSDP2
alone, which is measured first, is what the others are compared with. Prints a table in Markdown; "loss" and "norm" are
the largest relative differences of a step's loss and gradient norm, and "norm, step 1" is that of the first step, at
equal weights, with its sign.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from xorl.cli.bench_config import SHAPES
from xorl.config import load_config
from xorl.config.fields import ParameterDtype
from xorl.core.runtime import global_rank, shutdown
from xorl.train.build import build_run
from xorl.train.loop import train
from xorl.train.observe.progress import set_up_logging

# Steps that compile, allocate and plan: not timed.
WARMUP = 5
SHORTEST, LONGEST = 256, 4096
CYCLE = 64
# With this `ep_dispatch`, layers cannot be compiled.
EXACT = "alltoall"
REPLICAS = {"data_parallel_mode": "ddp"}
GRAPHS = {"enable_cuda_graphs": True, "enable_gradient_checkpointing": True, "recompute_policy": "module"}


@dataclass(frozen=True)
class Run:
    """A layout's run: its losses and gradient norms by step, the median rate, and the peak of memory."""

    losses: list[float]
    norms: list[float]
    tokens_per_s: float
    peak_gib: float

    @classmethod
    def read(cls, folder: Path) -> Run:
        """From the metrics of a run."""
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [record for record in records if "loss" in record]
        return cls(
            [step["loss"] for step in steps],
            [step["grad_norm"] for step in steps],
            statistics.median(step["tokens_per_s"] for step in steps[WARMUP:]),
            max(step["peak_memory_gib"] for step in steps),
        )


def layouts(num_ranks: int, *, has_experts: bool) -> Iterator[tuple[str, Mapping[str, int | str]]]:
    """The name and options of each layout, FSDP2 alone first. A name may end with a dispatch of tokens to experts."""
    yield "fsdp2", {}
    yield from replicas("ddp", {})
    sizes = [size for size in (2, 4, 8) if num_ranks % size == 0]
    for size in sizes:
        context = {f"ulysses {size}": {"ulysses_parallel_size": size}, f"ring {size}": {"ringattn_parallel_size": size}}
        yield from context.items()
        if size == num_ranks:
            yield from replicas(f"ulysses {size}, ddp", context[f"ulysses {size}"])
        yield f"tp {size}", {"tensor_parallel_size": size}
        if has_experts:
            experts = {"expert_parallel_size": size}
            yield f"ep {size}", experts
            if size == num_ranks:
                yield from replicas(f"ep {size}, ddp", experts)
            yield f"ep {size}, {EXACT}", experts
            for name, axis in context.items():
                yield f"{name}, ep {size}", {**axis, **experts}
            yield f"tp {size}, ep {size}", {"tensor_parallel_size": size, **experts}
    if num_ranks % 4 == 0:
        yield "ulysses 2 x ring 2", {"ulysses_parallel_size": 2, "ringattn_parallel_size": 2}
        if has_experts:
            yield "ulysses 2, ep 4", {"ulysses_parallel_size": 2, "expert_parallel_size": 4}
            yield "tp 2, ep 4", {"tensor_parallel_size": 2, "expert_parallel_size": 4}


def replicas(name: str, axes: Mapping[str, int]) -> Iterator[tuple[str, Mapping[str, int | str]]]:
    """The layout of replicas with these axes, and the same with layers in CUDA graphs, which need a GPU."""
    yield name, {**axes, **REPLICAS}
    if torch.cuda.is_available():
        yield f"{name}, CUDA graphs", {**axes, **REPLICAS, **GRAPHS}


def write_documents(file: Path, vocab_size: int, longest: int, num_tokens: int) -> None:
    """JSONL of documents of up to `longest` tokens, each with its own cycle of random tokens."""
    generator = np.random.default_rng(0)
    with file.open("w") as stream:
        while num_tokens > 0:
            length = int(generator.integers(SHORTEST, longest + 1))
            cycle = generator.integers(0, vocab_size, size=CYCLE)
            stream.write(json.dumps({"input_ids": np.resize(cycle, length).tolist()}) + "\n")
            num_tokens -= length


def train_rank(config: Path) -> None:
    """What `xorl train` does on one rank, except that nothing is saved."""
    loaded = load_config(config).config
    set_up_logging(loaded.train.log_format, loaded.train.log_level, is_main=global_rank() == 0)
    run = build_run(loaded)
    run.checkpoints.due = lambda step: False
    try:
        train(run, saves_on_signal=False)
    finally:
        run.observer.close()
        shutdown()


def measure(options: argparse.Namespace, name: str, changes: Mapping[str, int | str], folder: Path) -> Run:
    """Train in one layout, on all ranks."""
    axes = [axis for axis in changes if axis.endswith("_parallel_size") and axis != "expert_parallel_size"]
    num_sharing = math.prod(int(changes[axis]) for axis in axes)
    output = folder / name.replace(" ", "_").replace(",", "")
    is_exact = name.endswith(EXACT)
    config = {
        "model": {"config_path": str(folder / "model"), **({"ep_dispatch": EXACT} if is_exact else {})},
        "data": {
            "datasets": [{"path": str(folder / "documents.jsonl"), "type": "tokenized"}],
            "sample_packing_sequence_len": options.seq,
            "dataset_prepared_path": str(folder / "prepared"),
            # Graphs are captured for each number of tokens.
            **({"pad_to_multiple_of": options.seq} if "enable_cuda_graphs" in changes else {}),
        },
        "train": {
            "output_dir": str(output),
            "data_parallel_mode": "fsdp2",
            "gradient_accumulation_steps": options.tokens_per_step * num_sharing // (options.seq * options.ranks),
            "lr": 1e-4,
            "param_dtype": options.param_dtype,
            "enable_mixed_precision": options.mixed,
            "enable_gradient_checkpointing": options.recompute,
            "recompute_policy": "operation" if options.recompute else "module",
            "enable_compile": options.compile and not is_exact,
            "max_steps": options.steps,
            "save_hf_weights": False,
            "log_format": "structured",
            "use_wandb": False,
            **changes,
        },
    }
    file = folder / f"{output.name}.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks)]
    subprocess.run([*torchrun, __file__, "--config", str(file)], check=True, stdout=sys.stderr)
    return Run.read(output)


def differences(values: list[float], expected: list[float]) -> list[float]:
    """The difference of two series at each step, with its sign, relative to the expected value."""
    return [(a - b) / b for a, b in zip(values, expected, strict=True)]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", help="one of `xorl bench --model`")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--tokens-per-step", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--recompute", action="store_true", help="recompute what is not a product or attention")
    parser.add_argument("--mixed", action="store_true", help="compute in bf16, as GPUs should")
    parser.add_argument("--param-dtype", choices=get_args(ParameterDtype), default="fp32")
    parser.add_argument(
        "--compile", action="store_true", help=f"compile the layers, except with {EXACT}, which refuses it"
    )
    parser.add_argument("--layouts", nargs="+", help="only these, by name")
    parser.add_argument("--config", type=Path, help="be one rank of this run; passed by the tool itself")
    options = parser.parse_args()
    if options.config is not None:
        train_rank(options.config)
        return 0
    shape = json.loads((SHAPES / f"{options.shape}.json").read_text())
    columns = ("tokens/s", "of fsdp2", "peak, GiB", "last loss", "loss", "norm", "norm, median", "norm, step 1")
    lines = [
        f"| {options.shape}, {options.ranks} ranks | {' | '.join(columns)} |",
        "|---" * (1 + len(columns)) + "|",
    ]
    with tempfile.TemporaryDirectory(prefix="xorl_layouts_") as temporary:
        folder = Path(temporary)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(shape))
        num_tokens = (options.steps + 2) * options.tokens_per_step
        write_documents(folder / "documents.jsonl", shape["vocab_size"], min(LONGEST, options.seq), num_tokens)
        reference: Run | None = None
        for name, changes in layouts(options.ranks, has_experts="num_experts" in shape):
            if options.layouts is not None and name not in (*options.layouts, "fsdp2"):
                continue
            run = measure(options, name, changes, folder)
            reference = reference or run
            share = run.tokens_per_s / reference.tokens_per_s
            losses, norms = differences(run.losses, reference.losses), differences(run.norms, reference.norms)
            lines.append(
                f"| {name} | {run.tokens_per_s:,.0f} | {share:.2f} | {run.peak_gib:.1f} | {run.losses[-1]:.4f} | "
                f"{max(map(abs, losses)):.1e} | {max(map(abs, norms)):.1e} | "
                f"{statistics.median(map(abs, norms)):.1e} | {norms[0]:+.1e} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
