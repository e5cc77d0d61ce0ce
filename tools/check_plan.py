"""Prints what `xorl plan` predicts beside what was measured, for runs of docs/records. Needs no GPU.

uv run tools/check_plan.py                    # all of them
uv run tools/check_plan.py --only "4 x h100"  # those whose names contain this
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from xorl.cli.bench_config import SyntheticRun, write_config
from xorl.config import load_config
from xorl.train.model_source import read_architecture
from xorl.train.plan.estimate import Estimate, Estimator
from xorl.train.plan.rates import GIB, rates_of
from xorl.train.startup import parallel_dims

LAYERS = {"train.enable_gradient_checkpointing": "true"}
OPERATIONS = {**LAYERS, "train.recompute_policy": "operation"}
LORA = {"lora.enable_lora": "true"}
QLORA = {"lora.enable_qlora": "true"}
HALF = {"model.foundation": "{num_hidden_layers: 24}"}
EAGER = {"train.enable_compile": "false"}
GRAPHS = {"train.enable_cuda_graphs": "true"}
REPLICAS = {"train.data_parallel_mode": "ddp"}
BF16_STATES = {"train.optimizer": "anyprecision_adamw", "train.optimizer_dtype": "bf16"}
ALL_LINEAR = {"lora.lora_target_modules": "[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"}


@dataclass(frozen=True, eq=False)
class Measured:
    """A run of the records: tokens/s of all GPUs, and the peak of memory allocated on one, in GiB.

    length: of a document that stands for those of the data, by their pairs of tokens; None: of the whole row.
    """

    name: str
    shape: str
    card: str
    seq: int
    tokens_per_s: float
    peak_gib: float | None
    options: Mapping[str, str] = field(default_factory=dict)
    num_gpus: int = 1
    micro_batch_size: int = 1
    length: int | None = None


def _axes(**sizes: int) -> dict[str, str]:
    return {f"train.{axis}_parallel_size": str(size) for axis, size in sizes.items()}


def _pipeline(stages: int, count: int, **others: str) -> dict[str, str]:
    return {
        **OPERATIONS,
        **BF16_STATES,
        **_axes(pipeline=stages),
        "train.gradient_accumulation_steps": str(count),
        **{f"train.{name}": value for name, value in others.items()},
    }


MEASURED = (
    Measured("8B", "qwen3-8b", "h200", 8192, 11032, 79.1),
    Measured("8B in fp8", "qwen3-8b", "h200", 8192, 14605, 87.8, {"train.fp8": "tensorwise"}),
    Measured("8B, packed documents", "qwen3-8b", "h200", 8192, 12296 * 8192 / 7935, 79.1, length=2740),
    Measured("0.6B", "qwen3-0.6b", "h200", 4096, 101001, 72.2, micro_batch_size=16),
    Measured("1.7B", "qwen3-1.7b", "h200", 4096, 48535, 114.7, micro_batch_size=16),
    Measured("Gemma 3 4B", "gemma3-4b", "h200", 8192, 22035, 47.3),
    Measured("gpt-oss, 4 layers", "gpt-oss-20b-4-layers", "h200", 4096, 68366, 33.7, micro_batch_size=2),
    Measured("GLM-4.5-Air, 2 layers", "glm-4.5-air-2-layers", "h200", 4096, 61893, 45.4, micro_batch_size=2),
    Measured("30B-A3B, 12 layers", "qwen3-30b-a3b-12-layers", "h200", 4096, 61694, 62.4, micro_batch_size=4),
    Measured("8B, LoRA", "qwen3-8b", "h200", 8192, 14274, 48.1, LORA),
    Measured("8B, QLoRA", "qwen3-8b", "h200", 8192, 13979, 38.8, {**QLORA, "lora.quant_format": "nf4"}),
    Measured("70B, QLoRA, layers recomputed", "llama3-70b", "h200", 8192, 1380, 55.3, {**QLORA, **LAYERS}),
    Measured("30B-A3B, LoRA on experts", "qwen3-30b-a3b", "h200", 8192, 17433, 95.0, {**LORA, **ALL_LINEAR}),
    Measured("8B, 4,096 tokens", "qwen3-8b", "h100", 4096, 10800, 66.9, EAGER),
    Measured("8B, operations recomputed", "qwen3-8b", "h100", 8192, 10595, 74.0, {**OPERATIONS, **EAGER}),
    Measured("8B, layers recomputed", "qwen3-8b", "h100", 8192, 8898, 61.2, {**LAYERS, **EAGER}),
    Measured(
        "8B, 131,072 tokens, offloaded",
        "llama3-8b",
        "h200",
        131072,
        3000,
        85.4,
        {**LAYERS, "train.enable_activation_offload": "true"},
    ),
    Measured("8B, fsdp, layers", "qwen3-8b", "h200", 8192, 34722, 18.6, LAYERS, 4),
    Measured("8B, fsdp, 2 rows, layers", "qwen3-8b", "h200", 8192, 35662, 22.2, LAYERS, 4, 2),
    Measured(
        "8B, fsdp, layers, fp32", "qwen3-8b", "h200", 8192, 34533, 33.4, {**LAYERS, "train.param_dtype": "fp32"}, 4
    ),
    Measured("8B, fsdp, fp32", "qwen3-8b", "h200", 8192, 42771, 90.9, {"train.param_dtype": "fp32"}, 4, 2),
    Measured("8B, fsdp, layers", "qwen3-8b", "h100", 8192, 33697, None, LAYERS, 4),
    Measured("8B, fsdp, operations", "qwen3-8b", "h100", 8192, 39994, None, OPERATIONS, 4),
    Measured(
        "8B, kept gathered, operations",
        "qwen3-8b",
        "h100",
        8192,
        41068,
        53.9,
        {**OPERATIONS, "train.enable_full_shard": "false"},
        4,
    ),
    Measured(
        "8B, tp 2, operations",
        "qwen3-8b",
        "h200",
        16384,
        20553,
        55.3,
        {**OPERATIONS, **BF16_STATES, **_axes(tensor=2), "train.data_parallel_mode": "none"},
        2,
        length=4096,
    ),
    Measured("8B, pp 2", "qwen3-8b", "h100", 8192, 20242, 73.2, _pipeline(2, 16, data_parallel_mode="none"), 2),
    Measured("8B, pp 4", "qwen3-8b", "h100", 8192, 38368, 50.5, _pipeline(4, 32, data_parallel_mode="none"), 4),
    Measured(
        "8B, pp 2 x fsdp 2", "qwen3-8b", "h100", 8192, 38930, 57.2, _pipeline(2, 16, data_parallel_mode="fsdp2"), 4
    ),
    Measured(
        "8B, pp 2 x tp 2",
        "qwen3-8b",
        "h100",
        8192,
        34498,
        40.2,
        {**_pipeline(2, 16, data_parallel_mode="none"), **_axes(tensor=2)},
        4,
    ),
    Measured("8B, ulysses 2, 32,768 tokens", "qwen3-8b", "h100", 32768, 11400, 35.1, {**LAYERS, **_axes(ulysses=2)}, 2),
    Measured("8B, ring 2, 131,072 tokens", "qwen3-8b", "h100", 131072, 5184, 56.0, {**LAYERS, **_axes(ringattn=2)}, 2),
    Measured("30B-A3B, fsdp, layers", "qwen3-30b-a3b", "h100", 4096, 45634, 63.8, LAYERS, 4, 4),
    Measured("30B-A3B, fsdp, 1 row", "qwen3-30b-a3b", "h200", 4096, 19634, 62.0, LAYERS, 4),
    Measured(
        "30B-A3B, ep 4",
        "qwen3-30b-a3b",
        "h100",
        4096,
        48338,
        62.0,
        {**LAYERS, **_axes(expert=4), "model.ep_dispatch": "allgather"},
        4,
        4,
    ),
    Measured("30B-A3B, fsdp, 4 rows", "qwen3-30b-a3b", "h200", 4096, 50776, 63.8, LAYERS, 4, 4),
    Measured(
        "30B-A3B, ep 4, 1 row",
        "qwen3-30b-a3b",
        "h200",
        4096,
        23901,
        58.1,
        {**LAYERS, **_axes(expert=4), "model.ep_dispatch": "allgather"},
        4,
    ),
    Measured("30B-A3B, 24 layers, fsdp, 1 row", "qwen3-30b-a3b", "h200", 4096, 21347, 62.4, {**LAYERS, **HALF}, 2),
    Measured(
        "30B-A3B, 24 layers, ep 2, 1 row",
        "qwen3-30b-a3b",
        "h200",
        4096,
        27328,
        59.3,
        {**LAYERS, **HALF, **_axes(expert=2), "model.ep_dispatch": "allgather"},
        2,
    ),
    Measured(
        "30B-A3B, 24 layers, ep 2 of replicas, 1 row",
        "qwen3-30b-a3b",
        "h200",
        4096,
        34245,
        64.2,
        {**LAYERS, **HALF, **REPLICAS, **_axes(expert=2), "model.ep_dispatch": "allgather"},
        2,
    ),
    Measured(
        "30B-A3B, 24 layers, ep 2 of replicas, in CUDA graphs, 1 row",
        "qwen3-30b-a3b",
        "h200",
        4096,
        37934,
        64.2,
        {**LAYERS, **HALF, **REPLICAS, **GRAPHS, **_axes(expert=2), "model.ep_dispatch": "allgather"},
        2,
    ),
    Measured(
        "1.7B, ulysses 2 of replicas, 1 row",
        "qwen3-1.7b",
        "h200",
        4096,
        15502,
        15.0,
        {**LAYERS, **BF16_STATES, **REPLICAS, **_axes(ulysses=2)},
        2,
    ),
    Measured(
        "1.7B, ulysses 2 of replicas, in CUDA graphs, 1 row",
        "qwen3-1.7b",
        "h200",
        4096,
        42993,
        15.1,
        {**LAYERS, **BF16_STATES, **REPLICAS, **GRAPHS, **_axes(ulysses=2)},
        2,
    ),
    Measured(
        "1.7B, tp 2, in CUDA graphs, 1 row",
        "qwen3-1.7b",
        "h200",
        4096,
        49491,
        7.0,
        {**LAYERS, **BF16_STATES, "train.data_parallel_mode": "none", **GRAPHS, **_axes(tensor=2)},
        2,
    ),
    Measured(
        "30B-A3B, ep 4 of replicas, 1 row",
        "qwen3-30b-a3b",
        "h200",
        4096,
        31655,
        69.5,
        {**LAYERS, **REPLICAS, **_axes(expert=4), "model.ep_dispatch": "allgather"},
        4,
    ),
    Measured(
        "30B-A3B, ep 4 of replicas, 4 rows",
        "qwen3-30b-a3b",
        "h200",
        4096,
        52503,
        71.2,
        {**LAYERS, **REPLICAS, **_axes(expert=4), "model.ep_dispatch": "allgather"},
        4,
        4,
    ),
)


def predicted(run: Measured, folder: Path) -> tuple[Estimate, float]:
    """The estimate, and tokens/s of all GPUs."""
    path = write_config(
        SyntheticRun(
            model=run.shape,
            seq=run.seq,
            documents="single",
            micro_batch_size=run.micro_batch_size,
            tokens_per_step=None,
            num_ranks=run.num_gpus,
            num_steps=1,
            on_gpu=True,
        ),
        folder,
    )
    config = load_config(path, [f"--{name}={value}" for name, value in run.options.items()]).config
    dims = parallel_dims(config, run.num_gpus)
    estimator = Estimator(read_architecture(config.model), rates_of(run.card), run.length or run.seq)
    estimate = estimator.estimate(config, dims)
    train = config.train
    tokens = train.micro_batch_size * train.gradient_accumulation_steps * dims.dp_shard * dims.dp_replicate * run.seq
    return estimate, tokens / estimate.step_s


def _configuration(run: Measured) -> str:
    """What layouts and recomputation do not change."""
    fp32 = ", fp32" if run.options.get("train.param_dtype") == "fp32" else ""
    layers = ", 24 layers" if "model.foundation" in run.options else ""
    lora = ", adapters" if (LORA.keys() | QLORA.keys()) & run.options.keys() else ""
    return f"{run.shape}{layers}{fp32}{lora}, {run.micro_batch_size} x {run.seq:,}, {run.num_gpus} x {run.card}"


def print_best(rates: Mapping[Measured, float]) -> None:
    """Print, for configurations measured in several layouts, what the best one by prediction loses to the best one."""
    print("\n| configuration | layouts | best by prediction | best measured | its share |\n|---|---|---|---|---|")
    runs_of: dict[str, list[Measured]] = {}
    for run in rates:
        runs_of.setdefault(_configuration(run), []).append(run)
    for name, runs in runs_of.items():
        if len(runs) > 1:
            chosen, best = max(runs, key=lambda run: rates[run]), max(runs, key=lambda run: run.tokens_per_s)
            share = chosen.tokens_per_s / best.tokens_per_s
            print(f"| {name} | {len(runs)} | {chosen.name} | {best.name} | {share:.3f} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose name and card contain this")
    parser.add_argument("--seconds", action="store_true", help="also what takes the time of a step")
    options = parser.parse_args()
    print(
        "| run | GPUs | tokens/s | predicted | ratio | peak GiB | predicted | ratio |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    rates: dict[Measured, float] = {}
    for run in MEASURED:
        if options.only not in f"{run.name}, {run.num_gpus} x {run.card}":
            continue
        with tempfile.TemporaryDirectory(prefix="xorl_plan_") as folder:
            estimate, rate = predicted(run, Path(folder))
        rates[run] = rate
        peak = estimate.peak / GIB
        measured = ("", "") if run.peak_gib is None else (f"{run.peak_gib:.1f}", f"{peak / run.peak_gib:.3f}")
        print(
            f"| {run.name} | {run.num_gpus} x {run.card} | {run.tokens_per_s:,.0f} | {rate:,.0f} | "
            f"{rate / run.tokens_per_s:.3f} | {measured[0]} | {peak:.1f} | {measured[1]} |",
            flush=True,
        )
        if options.seconds:
            print({name: round(1000 * value, 1) for name, value in estimate.seconds.items()})
    print_best(rates)


if __name__ == "__main__":
    main()
