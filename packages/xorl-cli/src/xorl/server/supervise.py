"""Supervises processes: restarts them when they die or hang, and stops them without leaving any behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from xorl.host.processes import kill_with_descendants
from xorl.server.hangs import Hang, HangWatch
from xorl.server.process import PARENT_VARIABLE
from xorl.server.status_queries import ProcessStatus

logger = logging.getLogger(__name__)

BAD_INPUT = 2  # the exit code of a process that would fail again if restarted
FIRST_BACKOFF_S = 0.2
KILL_S = 10.0
MAX_BACKOFF_S = 5.0


class ProcessFailed(RuntimeError):
    """A process of the service died, and restarting it would not help. `code` is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Supervised:
    """A process that is restarted when it dies or hangs.

    It is given up once it has died max_early_exits times in a row within early_exit_s. inherited_fds: file descriptors
    that stay open in it. hangs: detects hangs; None detects none. num_restarts, last_restart, reason, hung_since: as in
    `ProcessStatus`.
    """

    name: Literal["workers", "orchestrator", "API"]
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    early_exit_s: float = 10.0
    max_early_exits: int = 5
    inherited_fds: tuple[int, ...] = ()
    hangs: HangWatch | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    num_restarts: int = 0
    last_restart: float | None = None
    reason: str | None = None
    hung_since: float | None = None
    _started: float = 0.0
    _early_exits: int = 0
    _restart_at: float | None = None
    _hang: Hang | None = field(default=None, repr=False)

    @property
    def status(self) -> ProcessStatus:
        """The process and its restarts, for the status page."""
        return ProcessStatus(self.name, self.num_restarts, self.last_restart, self.reason, self.hung_since)

    @property
    def pid(self) -> int | None:
        """The id of the running process, or None."""
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    def start(self) -> None:
        """Start the process in a new session, so that a Ctrl-C in the terminal reaches only the supervisor."""
        if self.hangs is not None:
            self.hangs.reset()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            env=os.environ | dict(self.environment) | {PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
            pass_fds=self.inherited_fds,
        )
        self._started, self._restart_at = time.monotonic(), None
        logger.info("event=started name=%s pid=%d", self.name, self.process.pid)

    def kill_if_hung(self) -> None:
        """If the process hangs, kill it. The next `restart_if_dead` restarts it."""
        if self.hangs is None or self.process is None or self._restart_at is not None:
            return
        hang = self.hangs.look(self.process.pid)
        if hang is None:
            return
        self._hang, self.hung_since = hang, hang.since
        if self.pid is not None:
            logger.error("event=hung name=%s pid=%d why=%r", self.name, self.process.pid, hang.reason)
            if not hang.is_logged:
                self.hangs.print_stacks(self.process.pid)
            self.kill()

    def restart_if_dead(self) -> None:
        """If the process has died, restart it after a delay. Raises ProcessFailed if that would not help."""
        now = time.monotonic()
        if self._restart_at is not None:
            if now >= self._restart_at:
                self.num_restarts, self.last_restart = self.num_restarts + 1, time.time()
                self.start()
            return
        assert self.process is not None, "the process has not been started"
        code = self.process.poll()
        if code is None:
            return
        ran_s = now - self._started
        # A process that hangs had started successfully.
        is_early = ran_s < self.early_exit_s and self._hang is None
        self._early_exits = self._early_exits + 1 if is_early else 1
        reason = describe_exit(code)
        self.reason = f"it ended with {reason}" if self._hang is None else f"it hung: {self._hang.reason}"
        self.hung_since = None if self._hang is None else self._hang.since
        self._hang = None
        logger.error("event=died name=%s pid=%d %s ran_s=%.1f", self.name, self.process.pid, reason, ran_s)
        if code == BAD_INPUT:
            raise ProcessFailed(f"the {self.name} cannot start: see its message above", code)
        if self._early_exits >= self.max_early_exits:
            raise ProcessFailed(
                f"the {self.name} died {self._early_exits} times, each within {self.early_exit_s:g} s of its start; "
                f"the last exit was {reason}",
                code,
            )
        self._restart_at = now + min(FIRST_BACKOFF_S * 2 ** (self._early_exits - 1), MAX_BACKOFF_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it is running, continuing it if it is stopped, and do not restart it."""
        self._restart_at = None
        if self.pid is not None and self.process is not None:
            self.process.send_signal(number)
            self.process.send_signal(signal.SIGCONT)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to end; returns whether it has ended."""
        if self.process is None:
            return True
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill the process and all its descendants."""
        if self.pid is None or self.process is None:
            return
        logger.warning("event=killed name=%s pid=%d", self.name, self.process.pid)
        kill_with_descendants(self.process.pid)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # A process that waits for a lost disk does not end even after SIGKILL.
        self.wait(KILL_S)


def describe_exit(code: int) -> str:
    """An exit code as a log field: `code=1` or `signal=SIGKILL`."""
    return f"signal={signal.Signals(-code).name}" if code < 0 else f"code={code}"
