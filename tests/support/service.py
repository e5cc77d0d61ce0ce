"""Service: a real service in processes of its own, which tests start, stop, and kill parts of."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import httpx
import pytest

from ports import free_port

if TYPE_CHECKING:
    import tinker
    import xorl_client

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "server" / "quickstart.yaml"
KEY = "tml-no-key-is-needed-here"
START_S = 180.0
STOP_S = 120.0


@dataclass
class Service:
    """A service that runs. `log` is what its processes have written so far."""

    url: str
    output_dir: Path
    arguments: list[str]
    log_file: Path
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    key: str = KEY
    cwd: Path = ROOT

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def start(self) -> None:
        """Start it, or start it again on the same folder and port; returns once it serves."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "xorl.server.launcher", *self.arguments],
                cwd=self.cwd,
                stdout=log,
                stderr=log,
                env=environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
        self.wait_ready()

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Return once training calls can be served; fails with the log where that does not come."""
        opener = build_opener(ProxyHandler({}))
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, f"the service ended with {self.process.returncode}:\n{self.log}"
            try:
                with opener.open(f"{self.url}/api/v1/healthz", timeout=5):
                    return
            except (URLError, OSError):
                time.sleep(0.1)
        pytest.fail(f"the service is not ready after {timeout_s:g} s:\n{self.log}")

    def stop(self) -> int:
        """Stop it as an operator would, and see that nothing of it is left; returns its exit code."""
        assert self.process is not None
        running = self.running()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"{self.log}\nthe service does not stop within {STOP_S:g} s")
        left = [process for process in running if process.is_left()]
        assert not left, f"{self.log}\nprocesses were left behind: {left}"
        return code

    def pids(self, name: str) -> list[int]:
        """The processes that were started under a name so far (workers, orchestrator, API), the running one last."""
        return [int(pid) for pid in re.findall(rf"event=started name={name} pid=(\d+)", self.log)]

    def running(self) -> list[Running]:
        """All processes that run, but the launcher."""
        started = [pids[-1] for name in ("workers", "orchestrator", "API") if (pids := self.pids(name))]
        started += self.worker_pids() if self.pids("workers") else []
        return [process for pid in started if (process := Running.of(pid)) is not None]

    def worker_pids(self) -> list[int]:
        """The ranks that run, in order."""
        parent = self.pids("workers")[-1]
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        except FileNotFoundError:
            return []
        return sorted(int(pid) for pid in children)

    def kill(self, name: str) -> None:
        """End one of the processes as a crash would (workers: all of them)."""
        for pid in self.worker_pids() if name == "workers" else [self.pids(name)[-1]]:
            os.kill(pid, signal.SIGKILL)

    def post(self, path: str, **body: object) -> dict[str, Any]:
        """The answer of a call with a JSON body, which must not be an error."""
        url, headers = f"{self.url}/{path}", {"X-API-Key": self.key}
        answer = httpx.post(url, json=body, headers=headers, timeout=120, trust_env=False)
        assert answer.is_success, answer.text
        return answer.json()

    def tinker(self) -> tinker.ServiceClient:
        """A client of the one public SDK; for `child.in_child`, since a fork after its threads have begun hangs."""
        import tinker  # noqa: PLC0415  (a dependency group that is not always there)

        return tinker.ServiceClient(base_url=self.url, api_key=self.key)

    def xorl(self) -> xorl_client.ServiceClient:
        """A client of the other; for `child.in_child` too."""
        import xorl_client  # noqa: PLC0415  (a dependency group that is not always there)

        return xorl_client.ServiceClient(base_url=self.url, api_key=self.key)


Serve = Callable[..., Service]
"""(config file, further launcher arguments, **options of the service) -> a Service that serves."""


def launch(folder: Path, config: Path, arguments: tuple[str, ...], options: dict[str, object]) -> Service:
    """A service that is not started yet, on a free port, with its log and its outputs in a folder."""
    port = free_port()
    overrides = {"output_dir": folder / "outputs", **options}
    return Service(
        url=f"http://127.0.0.1:{port}",
        output_dir=Path(str(overrides["output_dir"])),
        arguments=[
            *("--config", str(config), "--api-port", str(port), *arguments),
            *(part for name, value in overrides.items() for part in (f"--server.{name}", _yaml(value))),
        ],
        log_file=folder / "log",
    )


@dataclass(frozen=True)
class Running:
    """A process, which its start tells from a later process or thread with the same id."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Running | None:
        """The process with this id, or None if there is none that has not ended."""
        try:
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if state == "Z" else cls(pid, fields[18])

    def is_left(self) -> bool:
        """Whether it still runs."""
        return Running.of(self.pid) == self


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
