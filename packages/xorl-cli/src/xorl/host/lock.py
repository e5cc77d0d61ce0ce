"""The lock on an output_dir: a kernel lock on a file in it, held until the last process that has the file open ends.

`filelock` cannot replace this: `FileLock` owns its descriptor, closes it in forked children and unlocks it on release,
which would also release the lock of the processes that inherited it, and `lock_descriptor` has no timeout.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable
from typing import IO, Any

logger = logging.getLogger(__name__)

POLL_S = 0.1


class FolderInUseError(ValueError):
    """Another process holds the lock."""


def lock_within(
    timeout_s: float,
    file: IO[Any],
    describe_holder: Callable[[], str],
    *,
    advice: str,
    may_end: Callable[[], bool] | None = None,
) -> None:
    """Lock an open file, waiting up to `timeout_s` seconds while other processes hold the lock.

    Args:
        timeout_s: how long the processes of a killed run may take to notice and end.
        file: stays locked while this process, or one that inherited it, has it open.
        describe_holder: returns a message with the option that names the locked folder, and the holder of the lock.
        advice: what the user can do if the lock is not released.
        may_end: whether the holder may still end, so that waiting makes sense; None means always.

    Raises FolderInUseError with the holder and `advice` if the lock is not released in time, and OSError if the file
    system does not support locks.
    """
    deadline = time.monotonic() + timeout_s
    has_warned = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            message = describe_holder()
        if time.monotonic() > deadline or not (may_end is None or may_end()):
            raise FolderInUseError(f"{message}: {advice}")
        if not has_warned:
            logger.warning("%s; waiting %.0f s", message, timeout_s)
        has_warned = True
        time.sleep(POLL_S)
