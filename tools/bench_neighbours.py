"""Measures what one client's large request does to the steps of another client, and to the service's memory.

`uv run tools/bench_neighbours.py` starts the quickstart's service. One client trains its adapter step by step
(forward_backward and optim_step of 32 tokens, both results awaited), first alone, then while a client in another
process sends one request of `--datums` times `--tokens` tokens: a `forward`, a `forward_backward`, or with
`--kind sample` that number of samples of so many tokens. Prints Markdown: the times of a step alone and beside the
request, and the memory before the request and a minute after its result.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

from bench_service import CONFIG, MODEL, resident_bytes
from service_process import BenchError, Connection, Served, finished, serve

ALONE_S = 10.0
SETTLE_S = 60.0
TOKENS = 32
MEBIBYTE = 2**20
KINDS = ("forward", "forward_backward", "sample")


def datum(num_tokens: int, start: int = 0) -> dict[str, object]:
    """A datum of cross_entropy."""
    tokens = [(7 * (start + place)) % 97 + 1 for place in range(num_tokens)]
    targets = {"data": [*tokens[1:], 1], "dtype": "int64", "shape": [num_tokens]}
    return {"model_input": {"input_ids": tokens}, "loss_fn_inputs": {"target_tokens": targets}}


async def created(connection: Connection, name: str) -> None:
    """Connects and creates a model."""
    await connection.open()
    model = {"model_id": name, "base_model": MODEL, "lora_config": {"rank": 8}}
    await finished(connection, await connection.submit("/api/v1/create_model", model))


async def send_large(url: str, kind: str, num_datums: int, num_tokens: int) -> None:
    """Sends the large request, and prints how long its acknowledgement and its result took."""
    connection = Connection(url)
    await created(connection, "large")
    if kind == "sample":
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        sampling = {"max_tokens": num_tokens, "temperature": 1.0, "seed": 1, "stop": []}
        body = {"base_model": MODEL, "prompt": prompt, "num_samples": num_datums, "sampling_params": sampling}
        path = "/api/v1/asample"
    else:
        data = [datum(num_tokens, index) for index in range(num_datums)]
        call = {"data": data, "loss_fn": "cross_entropy"}
        body = {"model_id": "large", "seq_id": 1, f"{kind}_input": call}
        path = f"/api/v1/{kind}"
    print("sending", flush=True)
    started = time.perf_counter()
    request_id = await connection.submit(path, body)
    acknowledged = time.perf_counter()
    answer = await finished(connection, request_id)
    taken = time.perf_counter() - started
    if kind != "sample" and len(answer["loss_fn_outputs"]) != num_datums:  # pyright: ignore[reportArgumentType]
        raise BenchError(f"{num_datums} datums were sent, and {len(answer)} came back")
    print(f"{acknowledged - started:.1f} {taken:.1f}")
    connection.close()


async def take_steps(connection: Connection, first: int, until: asyncio.Future[Any], steps_s: list[float]) -> int:
    """Takes steps until `until` is done; returns the next number."""
    seq = first
    while not until.done():
        started = time.perf_counter()
        call = {"data": [datum(TOKENS)], "loss_fn": "cross_entropy"}
        sent = [
            ("/api/v1/forward_backward", {"forward_backward_input": call}),
            ("/api/v1/optim_step", {"adam_params": {"learning_rate": 1e-4}}),
        ]
        ids = [
            await connection.submit(path, {"model_id": "small", "seq_id": seq + i} | body)
            for i, (path, body) in enumerate(sent)
        ]
        for request_id in ids:
            await finished(connection, request_id)
        steps_s.append(time.perf_counter() - started)
        seq += 2
    return seq


def row(what: str, steps_s: Sequence[float]) -> str:
    """A line of the table."""
    cut = quantiles(steps_s, n=100, method="inclusive")
    return f"| {what} | {len(steps_s)} | {cut[49]:.3f} | {cut[98]:.3f} | {max(steps_s):.3f} |"


def memory(served: Served, folder: Path) -> dict[str, float]:
    """MiB of the processes and of the journal's files."""
    found = {name: resident_bytes(pid) / MEBIBYTE for name, pid in sorted(served.pids.items())}
    files = {file.name: file.stat().st_size / MEBIBYTE for file in sorted((folder / "service").glob("journal.sqlite*"))}
    return found | {name: size for name, size in files.items() if not name.endswith("-shm")}


async def measure(served: Served, folder: Path, flags: argparse.Namespace) -> None:
    """Runs both clients and prints the tables."""
    connection = Connection(served.url)
    await created(connection, "small")
    alone_s: list[float] = []
    beside_s: list[float] = []
    seq = await take_steps(connection, 1, asyncio.ensure_future(asyncio.sleep(ALONE_S)), alone_s)
    before = memory(served, folder)
    command = [sys.executable, __file__, "--url", served.url, "--kind", flags.kind]
    command += ["--datums", str(flags.datums), "--tokens", str(flags.tokens)]
    large = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert large.stdout is not None
    sending = asyncio.ensure_future(large.stdout.readline())
    seq = await take_steps(connection, seq, sending, [])
    ending = asyncio.ensure_future(large.communicate())
    seq = await take_steps(connection, seq, ending, beside_s)
    if large.returncode:
        raise BenchError("the large request failed")
    acknowledged_s, result_s = ending.result()[0].decode().split()
    at_once = memory(served, folder)
    await asyncio.sleep(flags.settle)
    after = memory(served, folder)
    print(f"{flags.kind} of {flags.datums} x {flags.tokens} tokens: acknowledged after {acknowledged_s} s, ", end="")
    print(f"result after {result_s} s\n")
    print("| step of another client | steps | p50 s | p99 s | max s |", "|---|---|---|---|---|", sep="\n")
    print(row("alone", alone_s), row("beside the request", beside_s), sep="\n")
    names = sorted({*before, *at_once, *after})
    print("\n| MiB | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|", sep="\n")
    for what, found in (("before", before), ("with the result", at_once), (f"{flags.settle:g} s later", after)):
        print(f"| {what} | " + " | ".join(f"{found.get(name, 0.0):.0f}" for name in names) + " |")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="forward")
    parser.add_argument("--datums", type=int, default=8000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--settle", type=float, default=SETTLE_S, help="seconds from the result to the last reading")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.url:
        asyncio.run(send_large(flags.url, flags.kind, flags.datums, flags.tokens))
        return 0
    with tempfile.TemporaryDirectory(prefix="xorl-bench-") as name:
        folder = Path(name)
        own = ["--server.output_dir", name, "--server.skip_initial_checkpoint", "true"]
        with serve(CONFIG, own, folder / "log", {"OMP_NUM_THREADS": "1"}) as served:
            asyncio.run(measure(served, folder, flags))
    return 0


if __name__ == "__main__":
    sys.exit(main())
