"""The lock of an output_dir: a kernel lock on a file in it, released when the processes that have it open end."""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable
from typing import IO, Any

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1


def lock_within(
    wait_s: float, file: IO[Any], taken: Callable[[], str], *, advice: str, may_end: Callable[[], bool] | None = None
) -> None:
    """Lock an open file; waits up to `wait_s` seconds if other processes hold the lock.

    Args:
        wait_s: time for the processes of a killed run to notice and end.
        file: stays locked while this process, or one that inherited it, has it open.
        taken: says which option names the locked folder, and who holds the lock.
        advice: what the user can do if the lock is not released.
        may_end: whether waiting can help; None, always.

    Raises ValueError with `taken` and `advice`, and OSError if the file system does not support locks.
    """
    deadline = time.monotonic() + wait_s
    is_told = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            told = taken()
        else:
            return
        if time.monotonic() > deadline or not (may_end is None or may_end()):
            raise ValueError(f"{told}: {advice}")
        if not is_told:
            logger.warning("%s; waiting %.0f s", told, wait_s)
        is_told = True
        time.sleep(LOOK_EVERY_S)
