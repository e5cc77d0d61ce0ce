"""Compares many layouts with one process, as `xorl verify` does: models, methods and layouts of 2, 4 and 8 gloo ranks.

    uv run tools/verify_layouts.py --world-sizes 2 4 8 --markdown layouts.md   # an hour on two cores
    uv run tools/verify_layouts.py --world-sizes 2 --runs llama                # a minute

Prints, for each layout and run, the largest relative error of any gradient, marked with `!` if anything (losses of
three steps, the clip norm, gradients) is beyond what `xorl verify` allows, and exits 1 if so. Shapes are public ones,
cut down. Ranks are started once for each world size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType

import torch

from xorl.cli.bench_config import SHAPES
from xorl.config import Config, config_from_mapping
from xorl.core import runtime
from xorl.core.mesh import Mesh
from xorl.train.build import build_engine
from xorl.train.model_source import read_architecture
from xorl.train.startup import parallel_dims
from xorl.train.verify import Result, Verification, compare, one_process, take_steps

NUM_BINS = 16
Options = Mapping[str, object]
LORA: Options = {"enable_lora": True, "lora_rank": 4}
ON_EXPERTS: Options = {**LORA, "lora_target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}
RECOMPUTE: Options = {"enable_gradient_checkpointing": True, "recompute_policy": "operation"}
DYNAMIC: Options = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
# By name: (shape, changes of its config.json, options of train, options of lora).
RUNS: Mapping[str, tuple[str, Options, Options, Options]] = MappingProxyType(
    {
        "llama": ("llama3-8b", {}, {}, {}),
        "llama, dynamic rope": ("llama3-8b", {"max_position_embeddings": 20, "rope_scaling": DYNAMIC}, {}, {}),
        "llama, LoRA": ("llama3-8b", {}, {}, LORA),
        "qwen3": ("qwen3-8b", {}, {}, {}),
        "qwen3, window": (
            "qwen3-8b",
            {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
            {},
            {},
        ),
        "qwen3, recomputed, Muon": ("qwen3-8b", {}, {**RECOMPUTE, "optimizer": "muon"}, {}),
        "qwen3, DoRA": ("qwen3-8b", {}, {}, {**LORA, "use_dora": True}),
        "qwen3, QLoRA": ("qwen3-8b", {}, {}, {**LORA, "enable_qlora": True, "quant_format": "nf4"}),
        "qwen3_moe": ("qwen3-30b-a3b", {}, {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.1}, {}),
        "qwen3_moe, recomputed": ("qwen3-30b-a3b", {}, {**RECOMPUTE, "moe_checkpoint_method": "moe_act"}, {}),
        "qwen3_moe, LoRA": ("qwen3-30b-a3b", {}, {}, {**ON_EXPERTS, "moe_hybrid_shared_lora": True}),
        "qwen3_moe, QLoRA": ("qwen3-30b-a3b", {}, {}, {**ON_EXPERTS, "enable_qlora": True, "quant_format": "nf4"}),
    }
)
# For 8 ranks, whose steps take long.
FEW_RUNS = ("llama, LoRA", "qwen3, window", "qwen3_moe")
WITH_EXPERTS = tuple(run for run in RUNS if run.startswith("qwen3_moe"))


def layouts(world_size: int) -> Iterator[tuple[str, Options]]:
    """The name and options of each layout of so many ranks."""
    sizes = [size for size in (1, 2, 4, 8) if size <= world_size]
    for replicate, shard, ring, ulysses in product(sizes, repeat=4):
        if math.prod((replicate, shard, ring, ulysses)) != world_size:
            continue
        context = {"ringattn_parallel_size": ring, "ulysses_parallel_size": ulysses}
        axes = {"replicate": replicate, "shard": shard, "ring": ring, "ulysses": ulysses}
        name = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
        dp = {"data_parallel_replicate_size": replicate, "data_parallel_shard_size": shard}
        modes = ["all"] if ring == ulysses == 1 else ["all", "none"]
        modes += ["ulysses_only", "ring_only"] if ring > 1 and ulysses > 1 else []
        for mode in modes:
            shown = f"{name}, {mode}" if len(modes) > 1 else name
            options = {"data_parallel_mode": "fsdp2", "cp_fsdp_mode": mode, **dp, **context}
            yield f"fsdp2: {shown}", options
            if mode == "all":
                for ep in (size for size in sizes if size > 1 and shard * ring * ulysses % size == 0):
                    yield f"fsdp2: {shown}, ep {ep}", {**options, "expert_parallel_size": ep}
        if shard == 1:
            yield f"ddp: {name}", {"data_parallel_mode": "ddp", **context}


def config_of(run: str, layout: Options, folder: Path) -> Config:
    """The configuration to verify, cut down."""
    shape, changes, train, lora = RUNS[run]
    values = {
        "model": {"config_path": str(folder / shape), "foundation": dict(changes)},
        "data": {"datasets": [{"path": "unused"}]},
        "train": {"output_dir": str(folder / "out"), **layout, **train},
        "lora": dict(lora),
    }
    return Verification.of(config_from_mapping(values).config, is_full=False).config


def measure(config: Config, mesh: Mesh) -> Result:
    """The steps of one layout. Collective."""
    runtime.seed_everything(0)
    architecture = read_architecture(config.model)
    return take_steps(build_engine(config, architecture, mesh, torch.device("cpu")), config, architecture, NUM_BINS)


def measure_ranks(folder: Path, runs: list[str]) -> None:
    """In each rank: measure one process, or compare all layouts of this world size with it."""
    torch.set_num_threads(1)
    joined = runtime.init("cpu")
    size = joined.world_size
    rows: dict[str, dict[str, tuple[float, bool]]] = {}
    if size == 1:
        for run in runs:
            config = one_process(config_of(run, {"data_parallel_mode": "none"}, folder))
            measure(config, Mesh(parallel_dims(config, 1), "cpu")).write(folder / "whole" / run)
    for name, options in layouts(size) if size > 1 else ():
        fitting = [run for run in runs if "expert_parallel_size" not in options or run in WITH_EXPERTS]
        if not fitting:
            continue
        mesh = Mesh(parallel_dims(config_of(fitting[0], options, folder), size), "cpu")
        for run in fitting:
            differences = compare(measure(config_of(run, options, folder), mesh), Result.read(folder / "whole" / run))
            largest = max(each.error for kind, each in differences.items() if kind.startswith("gradients"))
            is_equal = all(each.is_within for each in differences.values())
            rows.setdefault(name, {})[run] = (largest, is_equal)
        if joined.is_main:
            print(f"{name}: {rows[name]}", file=sys.stderr, flush=True)
            (folder / f"rows_{size}.json").write_text(json.dumps(rows), encoding="utf-8")
    runtime.shutdown()


def start(num_ranks: int, folder: Path, runs: list[str]) -> dict[str, dict[str, tuple[float, bool]]]:
    """Start ranks that run `measure_ranks`; returns their table."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", __file__]
    subprocess.run([*command, "--folder", str(folder), "--runs", *runs], check=True)
    file = folder / f"rows_{num_ranks}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[2])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure_ranks(options.folder, options.runs)
        return 0
    lines: list[str] = []
    failed = False
    with tempfile.TemporaryDirectory(prefix="xorl_layouts_") as temporary:
        folder = Path(temporary)
        for shape in {shape for shape, *_ in RUNS.values()}:
            (folder / shape).mkdir()
            (folder / shape / "config.json").write_text((SHAPES / f"{shape}.json").read_text())
        start(1, folder, options.runs)
        for world_size in options.world_sizes:
            runs = [run for run in options.runs if world_size < 8 or run in FEW_RUNS] or options.runs
            lines += [f"| {world_size} ranks | {' | '.join(runs)} |", "|---" * (len(runs) + 1) + "|"]
            for name, row in start(world_size, folder, runs).items():
                failed |= not all(is_equal for _, is_equal in row.values())
                shown = {run: f"{error:.1e}{'' if is_equal else ' !'}" for run, (error, is_equal) in row.items()}
                cells = [shown.get(run, "") for run in runs]
                lines.append(f"| {name} | {' | '.join(cells)} |")
            lines.append("")
    print("\n".join(lines), flush=True)
    if options.markdown is not None:
        options.markdown.write_text("\n".join(lines), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
