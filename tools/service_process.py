"""Starts a service like a user would, and calls it with a minimal HTTP client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from workspace import ROOT

START_S = 300.0
STOP_S = 120.0


class BenchError(Exception):
    """The service behaved incorrectly."""


@dataclass(frozen=True)
class Served:
    """A running service. pids: the processes of its API and its orchestrator by name, if it was started here."""

    url: str
    pids: Mapping[str, int]


class Connection:
    """A persistent connection with negligible overhead in the client."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80

    async def open(self) -> None:
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)

    async def post(self, path: str, body: Mapping[str, object]) -> tuple[int, dict[str, object]]:
        """Returns the status and the JSON of the response."""
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        self._writer.write(head.encode() + content)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:"))
        return int(lines[0].split()[1]), json.loads(await self._reader.readexactly(length))

    async def submit(self, path: str, body: Mapping[str, object]) -> str:
        """Returns the request id, with which the result is polled."""
        status, answer = await self.post(path, body)
        if status != 200:
            raise BenchError(f"{path} returned status {status}: {answer}")
        return str(answer["request_id"])

    def close(self) -> None:
        """Disconnect."""
        self._writer.close()


async def finished(connection: Connection, request_id: str) -> dict[str, object]:
    """Polls for the result of a request until it is ready."""
    while True:
        status, answer = await connection.post("/api/v1/retrieve_future", {"request_id": request_id})
        if status == 408 or answer.get("type") == "try_again":
            continue
        if status != 200 or "error" in answer:
            raise BenchError(f"{request_id} failed with status {status}: {answer}")
        return answer


@contextmanager
def serve(
    config: Path, overrides: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Starts a service on a free port, yields it once it is ready, and stops it on exit.

    Raises RuntimeError with the end of its log if it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "xorl.server.launcher", "--config", str(config), "--api-port", str(port)]
    with log.open("wb") as output:
        service = subprocess.Popen(
            [*command, *overrides], cwd=ROOT, stdout=output, stderr=output, env=os.environ | dict(environment or {})
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(service, url, log)
        yield Served(url, _pids(service.pid))
    except BenchError as problem:
        problem.add_note(f"the end of the service's log:\n{_end_of(log)}")
        raise
    finally:
        service.send_signal(signal.SIGTERM)
        try:
            service.wait(STOP_S)
        except subprocess.TimeoutExpired:
            # It is still saving; a second signal ends it.
            service.send_signal(signal.SIGTERM)
            service.wait()


def _wait_until_ready(service: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    opener = build_opener(ProxyHandler({}))
    while time.monotonic() < deadline:
        if service.poll() is not None:
            raise RuntimeError(f"the service ended:\n{_end_of(log)}")
        try:
            with opener.open(f"{url}/api/v1/healthz", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"the service is not ready after {START_S:g} s:\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


def _pids(launcher: int) -> dict[str, int]:
    """The process ids of a launcher's API and orchestrator, by name."""
    found = {}
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for pid in map(int, children):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        for name in ("orchestrator", "api"):
            if f"xorl.server.{name}\0" in command:
                found[name] = pid
    return found
