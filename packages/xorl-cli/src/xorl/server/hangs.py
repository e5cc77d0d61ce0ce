"""Detects hangs: processes of the service that run but make no progress.

Processes leave signs in a folder of the launcher: each touches a file (`host.alive`), and ranks that detect a hang
themselves (`train.watchdog`) leave a notice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from xorl.config import ServerConfig
from xorl.host.alive import STACKS_SIGNAL, AwakeClock
from xorl.host.processes import STOPPED, descendants, describe_state, state_of

NOTICE_FILE = "notice"
# From the start of a process to its first sign of life: it may import torch from a slow network file system.
START_S = 600.0
# On a busy machine, a process may not run for some seconds.
MIN_SILENCE_S = 10.0
# Far longer than a round of the launcher takes. If one takes longer, the launcher itself was stopped.
MAX_ROUND_S = 1.0
# The time that processes have to print their stacks.
STACKS_S = 0.5


class Hang(msgspec.Struct, frozen=True):
    """Why a process must be replaced, and since when it has hung. is_logged: its log already has the stacks."""

    reason: str
    since: float
    is_logged: bool = False


def silence_s(config: ServerConfig) -> float | None:
    """How long a process may give no sign of life; None if hang detection is off.

    Waiting calls fail `worker_connection_timeout` after the workers were lost, so new workers must start before that.
    """
    if config.worker_stall_timeout is None:
        return None
    return min(config.worker_stall_timeout, max(config.worker_connection_timeout / 2, MIN_SILENCE_S))


def give_notice(folder: Path, hang: Hang) -> bool:
    """Tell the launcher of a hang; returns whether this is the first notice."""
    temporary = folder / f".{NOTICE_FILE}.{os.getpid()}"
    temporary.write_bytes(msgspec.json.encode(hang))
    try:
        os.link(temporary, folder / NOTICE_FILE)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


@dataclass
class HangWatch:
    """Detects hangs of a process that the launcher started, or of the ranks below it.

    folder: where the processes leave their signs. names: the files that they touch. limit_s: how long they may be
    silent. takes_notice: whether the processes are ranks, which may also give notice of a hang.
    """

    folder: Path
    names: Sequence[str]
    limit_s: float
    takes_notice: bool = False
    _clock: AwakeClock = field(default_factory=lambda: AwakeClock(MAX_ROUND_S), repr=False)
    _touched: dict[str, tuple[int | None, float]] = field(default_factory=dict, repr=False)
    _stopped_at: float | None = field(default=None, repr=False)

    def reset(self) -> None:
        """Forget the signs of the previous process, before the next one starts."""
        for name in (*self.names, *([NOTICE_FILE] if self.takes_notice else [])):
            (self.folder / name).unlink(missing_ok=True)
        now = self._clock.now()
        self._touched = dict.fromkeys(self.names, (None, now))
        self._stopped_at = None

    def look(self, pid: int) -> Hang | None:
        """The hang of a process, if there is one. Must be called continually."""
        now = self._clock.now()
        notice = self.folder / NOTICE_FILE
        if self.takes_notice and notice.exists():
            return msgspec.json.decode(notice.read_bytes(), type=Hang)
        # The parent of the ranks has no file: it only waits.
        self._stopped_at = (self._stopped_at or now) if state_of(pid) == STOPPED else None
        if self._stopped_at is not None and now - self._stopped_at > self.limit_s:
            return _silence(f"process {pid}", pid, now - self._stopped_at)
        for name in self.names:
            time_ns = _touch_time(self.folder / name)
            if self._touched[name][0] != time_ns:
                self._touched[name] = (time_ns, now)
            silent_s = now - self._touched[name][1]
            if time_ns is None and silent_s > START_S:
                return Hang(f"{name} has not started within {START_S:g} s", time.time() - silent_s)
            if time_ns is not None and silent_s > self.limit_s:
                silent = int((self.folder / name).read_text())
                return _silence(f"{name} (process {silent})", silent, silent_s)
        return None

    def print_stacks(self, pid: int) -> None:
        """Have the process and its descendants print the stacks of their threads, as far as they can."""
        files = [self.folder / name for name in self.names]
        able = {int(file.read_text()) for file in files if _touch_time(file) is not None}
        running = [each for each in (pid, *descendants(pid)) if each in able and state_of(each) not in (None, STOPPED)]
        for each in running:
            with suppress(ProcessLookupError):
                os.kill(each, STACKS_SIGNAL)
        if running:
            time.sleep(STACKS_S)


def _silence(name: str, pid: int, silent_s: float) -> Hang:
    return Hang(f"{name} gave no sign of life for {silent_s:.0f} s: it {describe_state(pid)}", time.time() - silent_s)


def _touch_time(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return None
