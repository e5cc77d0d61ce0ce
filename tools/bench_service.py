"""Measures how quickly the service acknowledges requests, and checks that none is lost or processed twice.

`uv run tools/bench_service.py --clients 32 --requests 10000` starts the quickstart's service, or uses the one at
`--url`. Each client trains its own adapter: like the public clients, it sends forward_backward and optim_step together
and then polls for both results. Every twentieth request is sent twice. It is an error if a model takes more or fewer
steps than were sent, a result does not arrive, or a request gets two ids. The clients share one process and event loop
on the same machine as the service, so their own time is included. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

from service_process import BenchError, Connection, Served, finished, serve
from workspace import ROOT

RETRY_EVERY = 20
NUM_READINGS = 5
TOKENS = 32
MODEL = "xorl/quickstart"
CONFIG = ROOT / "configs/server/quickstart.yaml"


@dataclass
class Measured:
    """The measurements of all clients. memory: (requests done, bytes of each process of the service)."""

    acknowledged_s: list[float] = field(default_factory=list)
    result_s: list[float] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    num_done: int = 0
    num_retries: int = 0
    memory: list[tuple[int, dict[str, int]]] = field(default_factory=list)


async def send(connection: Connection, path: str, body: dict[str, object], measured: Measured) -> str:
    """Submits a request, some of them twice; returns the id."""
    started = time.perf_counter()
    status, answer = await connection.post(path, body)
    measured.acknowledged_s.append(time.perf_counter() - started)
    if status != 200:
        raise BenchError(f"{path} returned status {status}: {answer}")
    request_id = str(answer["request_id"])
    if len(measured.acknowledged_s) % RETRY_EVERY == 0:
        measured.num_retries += 1
        again = (await connection.post(path, body))[1]
        if again.get("request_id") != request_id:
            raise BenchError(f"{path} sent twice got {request_id} and {again}")
    if request_id in measured.ids:
        raise BenchError(f"two requests have the id {request_id}")
    measured.ids.add(request_id)
    return request_id


async def result(connection: Connection, request_id: str, measured: Measured) -> dict[str, object]:
    """Polls for a result until it is ready."""
    started = time.perf_counter()
    answer = await finished(connection, request_id)
    measured.result_s.append(time.perf_counter() - started)
    measured.num_done += 1
    return answer


async def train(url: str, name: str, num_rounds: int, measured: Measured) -> None:
    """One client: creates a model, and runs rounds of forward_backward and optim_step."""
    connection = Connection(url)
    await connection.open()
    model = {"model_id": name, "base_model": MODEL, "lora_config": {"rank": 8}}
    status, created = await connection.post("/api/v1/create_model", model)
    if status != 200:
        raise BenchError(f"create_model returned status {status}: {created}")
    await result(connection, str(created["request_id"]), measured)
    tokens = [(7 * place) % 97 + 1 for place in range(TOKENS)]
    targets = {"data": [*tokens[1:], 1], "dtype": "int64", "shape": [TOKENS]}
    datum = {"model_input": {"input_ids": tokens}, "loss_fn_inputs": {"target_tokens": targets}}
    for step in range(1, num_rounds + 1):
        call = {"data": [datum], "loss_fn": "cross_entropy"}
        body = {"model_id": name, "seq_id": 2 * step - 1, "forward_backward_input": call}
        computed = await send(connection, "/api/v1/forward_backward", body, measured)
        body = {"model_id": name, "seq_id": 2 * step, "adam_params": {"learning_rate": 1e-4}}
        stepped = await send(connection, "/api/v1/optim_step", body, measured)
        await result(connection, computed, measured)
        answer = await result(connection, stepped, measured)
        metrics = answer.get("metrics")
        if not isinstance(metrics, dict) or metrics.get("step") != step:
            raise BenchError(f"{name} sent {step} steps, but the service reports {metrics}")
    connection.close()


async def run(url: str, num_clients: int, num_requests: int, pids: Mapping[str, int]) -> Measured:
    """Runs all clients concurrently and samples the memory of the service."""
    measured = Measured()
    num_rounds = max(num_requests // (2 * num_clients), 1)
    names = [f"bench-{os.getpid()}-{index}" for index in range(num_clients)]
    clients = asyncio.gather(*(train(url, name, num_rounds, measured) for name in names))
    total = num_clients * (2 * num_rounds + 1)
    while not clients.done():
        if measured.num_done >= len(measured.memory) * total / NUM_READINGS:
            measured.memory.append((measured.num_done, {name: resident_bytes(pid) for name, pid in pids.items()}))
        await asyncio.wait([clients], timeout=0.05)
    await clients
    measured.memory.append((measured.num_done, {name: resident_bytes(pid) for name, pid in pids.items()}))
    return measured


def resident_bytes(pid: int) -> int:
    """The private memory of a process."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return 1024 * int(line.split()[1])
    return 0


def table(measured: Measured, num_clients: int, seconds: float) -> str:
    """The results as Markdown."""
    cut = quantiles(measured.acknowledged_s, n=100)
    lines = [
        "| clients | requests | sent twice | seconds | acknowledged p50 ms | p99 ms | max ms |",
        "|---|---|---|---|---|---|---|",
        f"| {num_clients} | {len(measured.ids)} | {measured.num_retries} | {seconds:.1f} | {1e3 * cut[49]:.1f} | "
        f"{1e3 * cut[98]:.1f} | {1e3 * max(measured.acknowledged_s):.1f} |",
    ]
    names = sorted(measured.memory[-1][1])
    if names:
        lines += ["", "| requests done | " + " | ".join(f"{name} MiB" for name in names) + " |", "|---" * 3 + "|"]
        for done, memory in measured.memory:
            lines.append(f"| {done} | " + " | ".join(f"{memory[name] / 2**20:.1f}" for name in names) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=10_000, help="total number of requests")
    parser.add_argument("--url", help="URL of a running service [starts the quickstart's]")
    flags = parser.parse_args(arguments)
    with ExitStack() as stack:
        if flags.url:
            served = Served(flags.url, {})
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xorl-bench-")))
            own = ["--server.output_dir", str(folder), "--server.skip_initial_checkpoint", "true"]
            served = stack.enter_context(serve(CONFIG, own, folder / "log", {"OMP_NUM_THREADS": "1"}))
        started = time.monotonic()
        measured = asyncio.run(run(served.url, flags.clients, flags.requests, served.pids))
        print(table(measured, flags.clients, time.monotonic() - started))
    return 0


if __name__ == "__main__":
    sys.exit(main())
