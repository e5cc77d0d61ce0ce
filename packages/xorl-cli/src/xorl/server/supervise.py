"""Processes that are kept running: started again when they die, and stopped in order, none left behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

BAD_INPUT = 2  # the exit code of a process that no second start would help
QUICK_S = 10.0  # a process that dies sooner after its start has not really run
MAX_QUICK_DEATHS = 5
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 5.0
STEADY_S = 600.0  # after so long, earlier deaths are forgotten
POLL_S = 0.05


class ProcessFailed(RuntimeError):
    """A process of the service died for good. `code` is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Supervised:
    """One process and how often it may die.

    max_restarts: None lets it die as often as it will, unless it dies again and again right after its start.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    num_restarts: int = 0
    _started: float = 0.0
    _deaths: list[float] = field(default_factory=list)
    _start_at: float | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that runs, or None."""
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    def start(self) -> None:
        """Start it, in a session of its own: a Ctrl-C in the terminal is for the supervisor alone."""
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            env=os.environ | dict(self.environment),
            start_new_session=True,
        )
        self._started, self._start_at = time.monotonic(), None
        logger.info("event=started name=%s pid=%d", self.name, self.process.pid)

    def look_after(self) -> None:
        """Start it again, in a while, if it has died. Raises ProcessFailed where that would be in vain."""
        now = time.monotonic()
        if self._start_at is not None:
            if now >= self._start_at:
                self.num_restarts += 1
                self.start()
            return
        assert self.process is not None, "started before"
        code = self.process.poll()
        if code is None:
            return
        ran_s = now - self._started
        if ran_s > STEADY_S:
            self._deaths.clear()
        self._deaths.append(now)
        logger.error("event=died name=%s pid=%d %s ran_s=%.1f", self.name, self.process.pid, how(code), ran_s)
        if code == BAD_INPUT:
            raise ProcessFailed(f"the {self.name} cannot start: its message is above", code)
        if self.max_restarts is not None and len(self._deaths) > self.max_restarts:
            raise ProcessFailed(f"the {self.name} died {len(self._deaths)} times, at last with {how(code)}", code)
        num_quick = len([death for death in self._deaths if now - death < QUICK_S * MAX_QUICK_DEATHS])
        if ran_s < QUICK_S and num_quick >= MAX_QUICK_DEATHS:
            raise ProcessFailed(f"the {self.name} dies again and again after its start, with {how(code)}", code)
        wait_s = min(FIRST_WAIT_S * 2 ** (len(self._deaths) - 1), LONGEST_WAIT_S)
        self._start_at = now + wait_s

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        self._start_at = None
        if self.pid is not None and self.process is not None:
            self.process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; returns whether it came."""
        if self.process is None:
            return True
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it at once, with what it has started in its session."""
        if self.pid is None or self.process is None:
            return
        logger.warning("event=killed name=%s pid=%d", self.name, self.process.pid)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def how(code: int) -> str:
    """An exit code in words."""
    return f"signal={signal.Signals(-code).name}" if code < 0 else f"code={code}"
