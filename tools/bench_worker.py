"""Times forward_backward and optim_step of the service's worker against the engine of local training.

    uv run tools/bench_worker.py                      # on a GPU: Qwen3-8B's shape, 8,192 tokens, LoRA and full
    uv run tools/bench_worker.py --kinds lora         # only adapters: one model, and 16 of them interleaved
    uv run torchrun --nproc-per-node 4 tools/bench_worker.py   # on four GPUs, with the same number of tokens each
    uv run tools/bench_worker.py --dry-run            # anywhere: a tiny shape, no figures

Both compute the same packs with the same configuration. The service's side decodes each message, runs it and encodes
the result, including values per token and gradient norms, like a worker; the channel and the processes in front of it
are not included. Models "in turn" train on separate packs; "mixed" models share each pack. Only one kind is built at a
time; they alternate for `--rounds` rounds. Prints medians over the steps as a Markdown table.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from xorl.cli.bench_config import SHAPES, shapes
from xorl.config import Config, ServerConfig, server_config_from_mapping
from xorl.config.server_training import training_config
from xorl.core import runtime
from xorl.core.loss import cross_entropy
from xorl.core.mesh import Mesh
from xorl.core.models import spec_for
from xorl.core.runtime import Runtime
from xorl.data.batch import Document, collate
from xorl.server.datum import Array, Datum
from xorl.server.messages import Done, Operation, Result, Work
from xorl.server.operations import CreateModel, Failure, ForwardBackward, LoraSpec, OptimStep
from xorl.server.worker.base import build_base
from xorl.server.worker.saved_models import PendingSave
from xorl.server.worker.worker import Worker
from xorl.train.build import build_engine
from xorl.train.model_source import read_architecture
from xorl.train.startup import parallel_dims

LR = 1e-5
WARM_UP = 3
DOCUMENTS = 4

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Work).decode


@dataclass(frozen=True)
class Bench:
    """The measured work: steps of `num_tokens` per rank, of one or of `num_models` models."""

    config: ServerConfig
    place: Runtime
    num_tokens: int
    num_models: int

    @property
    def tokens_of_step(self) -> int:
        """The tokens of a step over all ranks."""
        return self.num_tokens * self.place.world_size

    @property
    def local(self) -> Config:
        """The equivalent configuration of local training."""
        return training_config(self.config)

    def documents(self, count: int) -> list[np.ndarray]:
        """`count` documents of equal length, `num_tokens` in total."""
        vocab_size = read_architecture(self.local.model).config.vocab_size
        generator = np.random.default_rng(0)
        return [generator.integers(0, vocab_size, self.num_tokens // count) for _ in range(count)]


Step = Callable[[], int]
"""Queues or runs one step and returns its number of tokens."""


def local(bench: Bench) -> Step:
    """Steps of local training's engine, without waiting for the device."""
    config = bench.local
    mesh = Mesh(parallel_dims(config, bench.place.world_size), bench.place.device.type)
    engine = build_engine(config, read_architecture(config.model), mesh, bench.place.device)
    rows = bench.documents(DOCUMENTS)
    batch = collate([Document(row, row) for row in rows], pad_to_multiple_of=config.data.pad_to_multiple_of)

    def step() -> int:
        losses = engine.forward_backward([batch], cross_entropy)
        engine.optim_step(LR, losses.num_trained_tokens)
        return bench.tokens_of_step

    return step


def service(bench: Bench, *, num_models: int, is_mixed: bool) -> Step:
    """Steps of a worker's models. If mixed, each pass has tokens of all models; otherwise each pass is of one model."""
    worker = Worker(build_base(bench.config, bench.place))
    lora = LoraSpec() if bench.config.enable_lora else None
    names = [f"model{index}" for index in range(num_models)]
    for name in names:
        _run(worker, Work(["create"], [CreateModel(name, lora=lora)]))
    rows = bench.documents(num_models if is_mixed else DOCUMENTS)
    # The service distributes data over the ranks; in local training, each rank loads its own.
    shares = (
        [[row] * bench.place.world_size for row in rows] if is_mixed else [rows * bench.place.world_size] * num_models
    )
    calls = [
        ForwardBackward(name, [_datum(row) for row in own], "cross_entropy")
        for name, own in zip(names, shares, strict=True)
    ]
    steps = [OptimStep(name, LR, grad_clip_norm=1.0) for name in names]
    operations: list[list[Operation]] = [[*calls]] if is_mixed else []
    for call, update in zip(calls, steps, strict=True):
        turn: list[list[Operation]] = [[update]] if is_mixed else [[call], [update]]
        operations += turn
    # Workers receive encoded messages.
    messages = [_encode(Work([str(index) for index in range(len(own))], own)) for own in operations]
    num_tokens = bench.tokens_of_step * (1 if is_mixed else num_models)

    def step() -> int:
        for message in messages:
            _run(worker, _decode(message))
        return num_tokens

    return step


def _datum(row: np.ndarray) -> Datum:
    targets = np.append(row[1:], row[:1])
    return Datum(Array.of(row.astype(np.int32)), {"target_tokens": Array.of(targets.astype(np.int64))})


def _run(worker: Worker, work: Work) -> None:
    results: list[Result] = []
    for result in worker.run(work):
        if isinstance(result, Failure):
            raise RuntimeError(result.message)
        assert not isinstance(result, PendingSave), "nothing is saved here"
        results.append(result)
    _encode(Done(work.ids, results))


def measure(make: Callable[[], Step], num_steps: int, device: torch.device) -> tuple[float, float]:
    """Returns (tokens per second, peak memory in GiB) of what `make` builds, which is freed afterwards."""
    on_gpu = device.type == "cuda"
    step = make()
    for _ in range(WARM_UP if on_gpu else 1):
        step()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    num_tokens = sum(step() for _ in range(num_steps))
    if on_gpu:
        torch.cuda.synchronize()
    speed = num_tokens / (time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    del step
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return speed, peak


def service_options(
    options: argparse.Namespace, kind: str, folder: Path, *, num_ranks: int, on_gpu: bool
) -> dict[str, object]:
    """Returns the configuration of a service on the shape `options.model` with random weights, written to `folder`.

    It uses the fastest settings for this number of ranks.
    """
    shape = json.loads((SHAPES / f"{options.model}.json").read_text())
    (folder / "config.json").write_text(json.dumps(shape))
    values: dict[str, object] = {
        "config_path": str(folder),
        "output_dir": str(folder / "outputs"),
        "attn_implementation": "auto",
        "data_parallel_mode": "fsdp2" if num_ranks > 1 else "none",
        "data_parallel_shard_size": num_ranks,
        "init_device": "auto",
        "enable_gradient_checkpointing": options.recompute,
        "enable_compile": on_gpu,
        "sample_packing_sequence_len": options.tokens,
    }
    if kind == "full":
        # Parameters and gradients are fp32; with states in bf16, 8 billion of them fit one GPU.
        values["optimizer"] = "anyprecision_adamw"
    else:
        values |= {
            "enable_lora": True,
            "lora_rank": options.rank,
            # Exclude the head, as local training does, so that both sides train the same layers.
            "lora_target_modules": list(spec_for(shape).adapter_targets),
            "lora_models_on_device": max(options.models, 2),
        }
    return values


def kinds_of(bench: Bench) -> dict[str, Callable[[], Step]]:
    """The measured kinds by name. Each is compared with the first, and several models also with one."""
    kinds: dict[str, Callable[[], Step]] = {
        "local training": lambda: local(bench),
        "service, 1 model": lambda: service(bench, num_models=1, is_mixed=False),
    }
    if bench.config.enable_lora:
        kinds[f"service, {bench.num_models} models in turn"] = lambda: service(
            bench, num_models=bench.num_models, is_mixed=False
        )
        kinds[f"service, {bench.num_models} models mixed"] = lambda: service(
            bench, num_models=bench.num_models, is_mixed=True
        )
    return kinds


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", choices=shapes())
    parser.add_argument("--kinds", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--models", type=int, default=16, help="number of interleaved models")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10, help="steps per kind and round; divided among models in turn")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--output", type=Path, help="JSON file for all results")
    options = parser.parse_args(arguments)
    if options.dry_run:
        options.model, options.tokens, options.steps, options.rounds = "tiny", 8 * options.models, 1, 1
    place = runtime.init()
    on_gpu = place.device.type == "cuda"
    speeds: dict[str, dict[str, list[float]]] = {}
    peaks: dict[str, dict[str, float]] = {}
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as name:
            values = service_options(options, kind, Path(name), num_ranks=place.world_size, on_gpu=on_gpu)
            config = server_config_from_mapping(values).config
            bench = Bench(config, place, options.tokens, options.models)
            found = kinds_of(bench)
            speeds[kind] = {title: [] for title in found}
            peaks[kind] = dict.fromkeys(found, 0.0)
            for _ in range(options.rounds):
                for title, make in found.items():
                    # With models in turn, one step is a step of every model.
                    num_steps = max(options.steps // options.models, 1) if "in turn" in title else options.steps
                    speed, peak = measure(make, num_steps, place.device)
                    speeds[kind][title].append(speed)
                    peaks[kind][title] = max(peaks[kind][title], peak)
    if place.is_main:
        _print_table(speeds, peaks)
        if options.output is not None:
            record = {"options": {**vars(options), "output": None}, "tokens_per_s": speeds, "peaks": peaks}
            options.output.write_text(json.dumps(record, indent=1) + "\n")
    runtime.shutdown()
    return 0


def _print_table(speeds: dict[str, dict[str, list[float]]], peaks: dict[str, dict[str, float]]) -> None:
    print("| kind | what | tokens/s | of local | of 1 model | peak GiB |")
    print("|---|---|---|---|---|---|")
    for kind, found in speeds.items():
        medians = {title: statistics.median(values) for title, values in found.items()}
        base, one = list(medians.values())[:2]
        for title, median in medians.items():
            row = f"{median:,.0f} | {median / base:.3f} | {median / one:.3f} | {peaks[kind][title]:.1f}"
            print(f"| {kind} | {title} | {row} |")


if __name__ == "__main__":
    raise SystemExit(main())
