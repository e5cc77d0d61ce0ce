"""Deadline: when a run must stop so that it is saved before `train.max_time`."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

_IMPORTED_S = time.monotonic()
# Long enough to see the slow steps, with evaluations and saves; short enough to forget the first one, which compiles.
_NUM_INTERVALS = 100


class Deadline:
    """Leaves room for two more steps and a save before `limit_s` seconds have passed since the process started.

    Two, because the ranks agree on a step only in the step after it.

    Args:
        save_s: how long a save is expected to take.
        now: the seconds since the process started.
    """

    def __init__(self, limit_s: float, save_s: Callable[[], float], now: Callable[[], float] | None = None) -> None:
        self._limit_s = limit_s
        self._save_s = save_s
        self._now = now or process_age_s
        self._last_s = self._now()
        self._intervals: deque[float] = deque(maxlen=_NUM_INTERVALS)
        self._is_due = False

    def is_due(self) -> bool:
        """Whether the run must end now. Call it once in each step."""
        now, room_s = self._now(), self._save_s()
        self._intervals.append(now - self._last_s)
        self._last_s = now
        room_s += 2 * max(self._intervals)
        if not self._is_due and now + room_s >= self._limit_s:
            self._is_due = True
            logger.warning(
                "train.max_time: %.0f of %g s have passed, and two steps and a save may take %.0f s: the run saves and "
                "ends",
                now,
                self._limit_s,
                room_s,
            )
        return self._is_due


def process_age_s() -> float:
    """The seconds since this process started; except on Linux, since it imported this module."""
    if sys.platform != "linux":
        return time.monotonic() - _IMPORTED_S
    # The fields after the name, which may contain spaces: the 22nd of all is the start, in clock ticks since boot.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
