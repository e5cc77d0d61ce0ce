"""Compares the peaks that `recompute_policy: auto` predicts with measured ones, and its choice with the fastest.

    uv run tools/bench_recompute.py                                              # a tiny model, to test the tool
    uv run tools/bench_recompute.py --model qwen3-8b --kinds full fp8 --num-tokens 4096 8192 --json recompute.json

For each kind of training and length of the micro-batch, every setting runs a few optimizer steps on random tokens, on
one GPU, unless it is predicted to need more memory than there is. Prints a table in Markdown: peaks as torch's
allocator counts them, and tokens/s of the median step.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from xorl.config import Config, config_from_mapping
from xorl.core import runtime
from xorl.core.loss import cross_entropy
from xorl.core.mesh import Mesh, ParallelDims
from xorl.data import PackedBatch
from xorl.train.architecture import Architecture
from xorl.train.build import build_engine
from xorl.train.model_source import read_architecture
from xorl.train.recompute_choice import BY_LAYER, SETTINGS, MicroBatch, choose, measure, usable_bytes
from xorl.train.step_memory import PassProfile, held_bytes, pass_peak

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, object]] = {
    "qwen3-8b": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
KINDS: dict[str, dict[str, dict[str, object]]] = {
    "full": {},
    "lora": {"lora": {"enable_lora": True, "lora_rank": 16}},
    "qlora": {"lora": {"enable_lora": True, "lora_rank": 16, "enable_qlora": True, "quant_format": "nf4"}},
    "fp8": {"train": {"fp8": "tensorwise"}},
}
# Steps not measured: compilation, and memory that grows in the first ones.
WARMUP = 2


@dataclass(frozen=True)
class Row:
    """One setting of one kind of training; GiB, tokens/s. Nothing is measured where memory would not suffice."""

    kind: str
    num_tokens: int
    setting: str
    predicted: float
    measured: float | None
    reserved: float | None
    tokens_per_s: float | None
    is_chosen: bool


def config_of(folder: Path, kind: str, num_tokens: int, options: dict[str, object]) -> Config:
    """A configuration of one GPU, bf16 parameters and states."""
    extra = KINDS[kind]
    return config_from_mapping(
        {
            "model": {"config_path": str(folder)},
            "data": {"datasets": [{"path": "unused"}], "sample_packing_sequence_len": num_tokens},
            "train": {
                "output_dir": str(folder / "output"),
                "data_parallel_mode": "none",
                "param_dtype": "bf16",
                **extra.get("train", {}),
                **options,
            },
            "lora": extra.get("lora", {}),
        }
    ).config


def batch_of(num_tokens: int, vocab_size: int, device: torch.device) -> PackedBatch:
    """One document of random tokens."""
    ids = torch.randint(vocab_size, (num_tokens,), device=device)
    return PackedBatch(
        input_ids=ids,
        labels=ids,
        positions=torch.arange(num_tokens, device=device),
        cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        lengths=(num_tokens,),
        num_tokens=num_tokens,
        num_trained_tokens=num_tokens,
    )


def run_steps(
    config: Config, architecture: Architecture, mesh: Mesh, device: torch.device, num_steps: int
) -> tuple[float, float, float]:
    """Peak GiB allocated and reserved, beyond what was there before, and tokens/s."""
    num_tokens = config.data.sample_packing_sequence_len
    batch = batch_of(num_tokens, architecture.config.vocab_size, device)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    engine, times = build_engine(config, architecture, mesh, device), list[float]()
    for _ in range(WARMUP + num_steps):
        started = time.perf_counter()
        engine.forward_backward([batch], cross_entropy)
        engine.optim_step(1e-6, num_tokens)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    speed = num_tokens / statistics.median(times[WARMUP:])
    if device.type != "cuda":
        return 0.0, 0.0, speed
    peaks = torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()
    return peaks[0] / 2**30, peaks[1] / 2**30, speed


def free_memory() -> None:
    """Free the model that ran before."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def rows_of(folder: Path, kind: str, num_tokens: int, device: torch.device, num_steps: int) -> Iterator[Row]:
    """Every setting, and those that apply to half of the layers."""
    config = config_of(folder, kind, num_tokens, {"recompute_policy": "auto"})
    architecture, batch = read_architecture(config.model), MicroBatch(num_tokens, num_tokens)
    mesh, num_layers = Mesh(ParallelDims.resolve("none", 1), device.type), architecture.config.num_layers
    held = held_bytes(config, architecture, mesh.dims)
    counts: list[tuple[str, int | None]] = [(name, None) for name in SETTINGS]
    counts += [(name, num_layers // 2) for name in BY_LAYER]
    profiles: dict[str, PassProfile] = {}
    choice, total = ("none", None), float("inf")
    if device.type == "cuda":
        usable, total = usable_bytes(device), torch.cuda.mem_get_info()[0]
        profiles = {name: measure(config, name, architecture, mesh, device, batch) for name in SETTINGS}
        best = choose(profiles.__getitem__, num_layers, held, usable)[-1]
        choice = best.setting, best.num_layers
    else:
        counts.remove(("layer and offload", None))
    if choice not in counts:
        counts.append(choice)
    for name, count in counts:
        predicted = 0.0
        if profiles:
            applied = num_layers if count is None else count
            by_layer = [profiles[name]] * applied + [profiles["none"]] * (num_layers - applied)
            predicted = held.throughout + pass_peak(by_layer, held.gradient_ratio)
        peaks: tuple[float | None, float | None, float | None] = (None, None, None)
        if predicted < total:
            own = config_of(folder, kind, num_tokens, {**SETTINGS[name], "recompute_num_layers": count})
            with suppress(torch.OutOfMemoryError):
                peaks = run_steps(own, architecture, mesh, device, num_steps)
            free_memory()
        setting = name if count is None else f"{name} in {count}"
        yield Row(kind, num_tokens, setting, predicted / 2**30, *peaks, is_chosen=(name, count) == choice)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["full"])
    parser.add_argument("--num-tokens", nargs="+", type=int, default=[256])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    device = runtime.init().device
    print("| kind | tokens | setting | predicted GiB | measured GiB | ratio | reserved GiB | tokens/s | chosen |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**QWEN3, **SHAPES[options.model]}), encoding="utf-8")
        for kind in options.kinds:
            for num_tokens in options.num_tokens:
                for row in rows_of(Path(folder), kind, num_tokens, device, options.steps):
                    rows.append(row)
                    print(line(row), flush=True)
                    if options.json is not None:
                        options.json.write_text(json.dumps([asdict(each) for each in rows], indent=1), encoding="utf-8")
    runtime.shutdown()


def line(row: Row) -> str:
    """The row of the table."""
    if row.measured is None or row.tokens_per_s is None:
        return f"| {row.kind} | {row.num_tokens} | {row.setting} | {row.predicted:.1f} | | | | | |"
    ratio = row.predicted / row.measured if row.measured else 0.0
    return (
        f"| {row.kind} | {row.num_tokens} | {row.setting} | {row.predicted:.1f} | {row.measured:.1f} | {ratio:.3f} | "
        f"{row.reserved:.1f} | {row.tokens_per_s:.0f} | {'yes' if row.is_chosen else ''} |"
    )


if __name__ == "__main__":
    main()
