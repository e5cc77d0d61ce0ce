"""Whose an output_dir is: a lock of the kernel's on a file in it, which ends with the processes that have it open."""

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
    """Lock an open file, for which `wait_s` are waited where other processes have it.

    Args:
        wait_s: for the processes of a run that was killed, which notice and end.
        file: stays locked while this process, or one that inherited it, has it open.
        taken: says which option names what is taken, and by whom.
        advice: what to do about it, if nobody gives it back.
        may_end: says whether waiting is of any use; None, always.

    Raises ValueError of `taken` and `advice`, and OSError where the file system knows no locks.
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
