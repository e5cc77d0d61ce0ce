"""Processes that are kept running: started again when they die, and stopped in order, none left behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xorl.server.process import PARENT_VARIABLE

logger = logging.getLogger(__name__)

BAD_INPUT = 2  # the exit code of a process that no second start would help
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 5.0


class ProcessFailed(RuntimeError):
    """A process of the service died for good. `code` is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Supervised:
    """One process and how often it may die: for good after max_quick_deaths in a row within quick_s of its start.

    held: file descriptors that stay open in it.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    quick_s: float = 10.0
    max_quick_deaths: int = 5
    held: tuple[int, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    num_restarts: int = 0
    _started: float = 0.0
    _quick_deaths: int = 0
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
            env=os.environ | dict(self.environment) | {PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
            pass_fds=self.held,
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
        self._quick_deaths = self._quick_deaths + 1 if ran_s < self.quick_s else 1
        logger.error("event=died name=%s pid=%d %s ran_s=%.1f", self.name, self.process.pid, how(code), ran_s)
        if code == BAD_INPUT:
            raise ProcessFailed(f"the {self.name} cannot start: its message is above", code)
        if self._quick_deaths >= self.max_quick_deaths:
            raise ProcessFailed(
                f"the {self.name} died {self._quick_deaths} times, each within {self.quick_s:g} s of its start, at "
                f"last with {how(code)}",
                code,
            )
        self._start_at = now + min(FIRST_WAIT_S * 2 ** (self._quick_deaths - 1), LONGEST_WAIT_S)

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
