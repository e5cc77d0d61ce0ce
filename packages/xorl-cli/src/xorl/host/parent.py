"""Ends or signals a process when its parent ends."""

import ctypes
import os
import signal
import sys
import threading
import time

CHECK_S = 0.5
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Ends this process with SIGKILL as soon as its parent ends, whatever it is doing.

    `parent` is the parent's process id. On Linux the kernel sends the signal; elsewhere a thread looks for the parent
    every CHECK_S seconds. The parent may have ended before the call. On Linux, the thread that started this process
    must live as long as the parent does.
    """
    if not signal_at_end_of_parent(signal.SIGKILL):
        threading.Thread(target=_watch, args=(parent,), name="xorl-parent", daemon=True).start()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def signal_at_end_of_parent(number: signal.Signals) -> bool:
    """Asks the kernel to send this process a signal when its parent ends; returns whether it agreed. Only on Linux."""
    if sys.platform != "linux":
        return False
    try:
        return ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) == 0
    except (OSError, AttributeError):  # a C library without prctl
        return False


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(CHECK_S)
    os.kill(os.getpid(), signal.SIGKILL)
