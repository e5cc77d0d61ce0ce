"""fake_engines: start stand-ins of inference servers, each in a process of its own."""

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

import fake_sglang


@dataclass(frozen=True)
class FakeEngine:
    """A running stand-in; see fake_sglang.py."""

    port: int
    kill: Callable[[], None]

    def seen(self) -> dict[str, Any]:
        """What it was sent and asked."""
        return httpx.get(f"http://127.0.0.1:{self.port}/seen", timeout=10, trust_env=False).json()

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return httpx.post(f"http://127.0.0.1:{self.port}{path}", json=body, timeout=30, trust_env=False)


def described(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, object]]:
    """Tensors as a stand-in describes those that it was sent."""
    found: dict[str, dict[str, object]] = {}
    for name, tensor in tensors.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        shape, digest = list(tensor.shape), hashlib.sha256(data).hexdigest()
        found[name] = {"dtype": str(tensor.dtype)[6:], "shape": shape, "sha256": digest}
    return found


def continued(prompt: list[int], version: str, length: int, seed: int = 0) -> list[int]:
    """What the stand-in samples: see fake_sglang.py."""
    first = sum(prompt) + seed + len(version)
    return [(first + index) % 50 for index in range(length)]


@contextmanager
def fake_engines(*engines: Sequence[str]) -> Iterator[list[FakeEngine]]:
    """One for each list of arguments; they end with the block. They are forked, so they know no GPU."""
    context = get_context("fork")
    processes, pipes = [], []
    for arguments in engines:
        reading, writing = context.Pipe(duplex=False)
        process = context.Process(target=fake_sglang.serve, args=(list(arguments), writing.send), daemon=True)
        process.start()
        processes.append(process)
        pipes.append(reading)
    try:
        yield [FakeEngine(pipe.recv(), process.kill) for pipe, process in zip(pipes, processes, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextmanager
def started_engines(*engines: Sequence[str]) -> Iterator[list[FakeEngine]]:
    """The same, started anew, for a GPU."""
    file = Path(__file__).with_name("fake_sglang.py")
    processes = [
        subprocess.Popen([sys.executable, str(file), *arguments], stdout=subprocess.PIPE, text=True)
        for arguments in engines
    ]
    try:
        found = []
        for process in processes:
            assert process.stdout is not None
            port = int(process.stdout.readline().partition("=")[2])
            found.append(FakeEngine(port, process.kill))
        yield found
    finally:
        for process in processes:
            process.kill()
            process.wait()
