"""Times training through the whole service, with HTTP, journal, channels and workers, against local training.

    uv run tools/bench_api.py                   # on a GPU: Qwen3-8B's shape, 8,192 tokens, LoRA and full
    uv run tools/bench_api.py --nproc 4         # on four GPUs, with the same number of tokens each
    uv run tools/bench_api.py --dry-run         # anywhere: a tiny shape, no figures

Both compute the same packs with the same configuration, in separate processes, alternating for `--rounds` rounds. The
service is started as a user would start it. One client runs a typical training loop: it sends forward_backward and
optim_step of a step as JSON before it has the results of the previous step, and receives values per token. Prints a
Markdown table of medians: of the rounds, and over all steps of the time until a forward_backward is acknowledged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from bench_worker import DOCUMENTS, LR, WARM_UP, Bench, local, measure, service_options
from service_process import Connection, finished, serve
from workspace import ROOT
from xorl.cli.bench_config import shapes
from xorl.config import load_server_config
from xorl.core import runtime

MODEL = "bench"
# Number of steps in flight: sent before their results are read.
AHEAD = 1


@dataclass
class Timed:
    """Times measured by a client: when the result of each step arrived, and how long it took to submit data."""

    done: list[float] = field(default_factory=list)
    acknowledged_s: list[float] = field(default_factory=list)


def measure_local(config: Path, options: argparse.Namespace, num_ranks: int) -> float:
    """Tokens per second of local training."""
    output = config.with_name("local.json")
    command = [sys.executable, "-m", "xorl.server.ranks", str(num_ranks), str(Path(__file__).resolve())]
    command += ["--local-side", str(config), str(output), "--tokens", str(options.tokens)]
    subprocess.run([*command, "--steps", str(options.steps)], check=True, cwd=ROOT)
    return json.loads(output.read_text())


def local_side(config: Path, output: Path, num_tokens: int, num_steps: int) -> None:
    """One rank of `measure_local`, in its own process."""
    place = runtime.init()
    bench = Bench(load_server_config(config).config, place, num_tokens, num_models=1)
    speed, _ = measure(lambda: local(bench), num_steps, place.device)
    if place.is_main:
        output.write_text(json.dumps(speed))
    runtime.shutdown()


def measure_service(config: Path, options: argparse.Namespace, num_ranks: int) -> tuple[float, Timed]:
    """Returns (tokens per second of the service, the times that its client measured)."""
    rows = _rows(config, options.tokens) * num_ranks
    num_warm_up = WARM_UP if torch.cuda.is_available() else 1
    with serve(config, [], config.with_name("service.log")) as served:
        timed = asyncio.run(train(served.url, MODEL, rows, num_warm_up + options.steps))
    seconds = timed.done[-1] - timed.done[num_warm_up - 1]
    return options.steps * options.tokens * num_ranks / seconds, timed


def _rows(config: Path, num_tokens: int) -> list[list[int]]:
    """The documents of one pack, all equally long. Their tokens do not affect the time."""
    shape = json.loads((config.parent / "config.json").read_text())
    generator = np.random.default_rng(0)
    return [generator.integers(0, shape["vocab_size"], num_tokens // DOCUMENTS).tolist() for _ in range(DOCUMENTS)]


async def train(url: str, base_model: str, rows: Sequence[Sequence[int]], num_steps: int) -> Timed:
    """Trains on the same rows in a loop, sending AHEAD steps before reading their results."""
    sending, polling, timed = Connection(url), Connection(url), Timed()
    await sending.open()
    await polling.open()
    created = await sending.submit("/api/v1/create_model", {"model_id": MODEL, "base_model": base_model})
    await finished(polling, created)
    waiting: deque[tuple[str, str]] = deque()
    for step in range(num_steps):
        waiting.append(await _send_step(sending, rows, step, timed))
        if len(waiting) > AHEAD:
            await _read_step(polling, waiting.popleft(), timed)
    while waiting:
        await _read_step(polling, waiting.popleft(), timed)
    # A stopped service would first save its models, which is not needed here.
    await finished(polling, await sending.submit("/api/v1/unload_model", {"model_id": MODEL}))
    sending.close()
    polling.close()
    return timed


async def _send_step(connection: Connection, rows: Sequence[Sequence[int]], step: int, timed: Timed) -> tuple[str, str]:
    data = [
        {
            "model_input": {"input_ids": row},
            "loss_fn_inputs": {
                "target_tokens": {"data": [*row[1:], row[0]], "dtype": "int64", "shape": [len(row)]},
                "weights": {"data": [1.0] * len(row), "dtype": "float32", "shape": [len(row)]},
            },
        }
        for row in rows
    ]
    call = {"data": data, "loss_fn": "cross_entropy"}
    body = {"model_id": MODEL, "seq_id": 2 * step + 1, "forward_backward_input": call}
    started = time.perf_counter()
    computed = await connection.submit("/api/v1/forward_backward", body)
    timed.acknowledged_s.append(time.perf_counter() - started)
    adam = {"learning_rate": LR, "grad_clip_norm": 1.0}
    body = {"model_id": MODEL, "seq_id": 2 * step + 2, "adam_params": adam}
    return computed, await connection.submit("/api/v1/optim_step", body)


async def _read_step(connection: Connection, ids: tuple[str, str], timed: Timed) -> None:
    for request_id in ids:
        await finished(connection, request_id)
    timed.done.append(time.perf_counter())


def table(speeds: dict[str, dict[str, list[float]]], acknowledged_s: dict[str, list[float]]) -> str:
    """The results as Markdown."""
    lines = ["| kind | what | tokens/s | of local | acknowledged ms |", "|---|---|---|---|---|"]
    for kind, found in speeds.items():
        base = statistics.median(found["local training"])
        for title, values in found.items():
            median = statistics.median(values)
            ms = "" if title == "local training" else f"{1e3 * statistics.median(acknowledged_s[kind]):.0f}"
            lines.append(f"| {kind} | {title} | {median:,.0f} | {median / base:.3f} | {ms} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", choices=shapes())
    parser.add_argument("--kinds", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--nproc", type=int, help="number of GPUs [all, or 1 without GPUs]")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per rank and step")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--output", type=Path, help="JSON file for all results")
    parser.add_argument("--local-side", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments, argparse.Namespace(models=1))
    if options.local_side is not None:
        config, output = options.local_side
        local_side(config, output, options.tokens, options.steps)
        return 0
    if options.dry_run:
        options.model, options.tokens, options.steps, options.rounds = "tiny", 64, 2, 1
    num_gpus = torch.cuda.device_count()
    num_ranks = options.nproc or max(num_gpus, 1)
    speeds: dict[str, dict[str, list[float]]] = {}
    acknowledged_s: dict[str, list[float]] = {}
    for kind in options.kinds:
        local_speeds, service_speeds, acknowledged_s[kind] = [], [], []
        speeds[kind] = {"local training": local_speeds, "service, over HTTP": service_speeds}
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory(prefix="xorl-bench-") as name:
                config = _write_config(options, kind, Path(name), num_ranks, on_gpu=num_gpus > 0)
                local_speeds.append(measure_local(config, options, num_ranks))
                speed, timed = measure_service(config, options, num_ranks)
            service_speeds.append(speed)
            acknowledged_s[kind] += timed.acknowledged_s
    print(table(speeds, acknowledged_s))
    if options.output is not None:
        record = {"tokens_per_s": speeds, "acknowledged_s": acknowledged_s, "num_ranks": num_ranks}
        chosen = {"model": options.model, "tokens": options.tokens, "steps": options.steps, "rank": options.rank}
        options.output.write_text(json.dumps({"options": chosen, **record}, indent=1) + "\n")
    return 0


def _write_config(options: argparse.Namespace, kind: str, folder: Path, num_ranks: int, *, on_gpu: bool) -> Path:
    values = service_options(options, kind, folder, num_ranks=num_ranks, on_gpu=on_gpu)
    config = folder / "config.yaml"
    # JSON is YAML.
    config.write_text(json.dumps(values | {"model_name": MODEL, "skip_initial_checkpoint": True}, indent=2) + "\n")
    return config


if __name__ == "__main__":
    raise SystemExit(main())
