"""What every process of the service does first: it logs in the same form, and ends when who started it has ended."""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
import threading
import time

from xorl.config.server import LogLevel

PARENT_VARIABLE = "XORL_PARENT"  # of the environment: the process that starts this one
PARENT_CHECK_S = 0.5
GRACE_S = 20.0  # to save what is on its way; a process that waits in a collective never sees the signal


def begin_process(name: str, log_level: LogLevel, *, follows_parent: bool = True) -> None:
    """Sets up the logging of a process and, unless it is nobody's child, its end with its parent."""
    logging.basicConfig(
        level=log_level,
        format=f"%(asctime)s level=%(levelname)s process={name} %(message)s",
        stream=sys.stderr,
        force=True,
    )
    # At INFO these would log each request, and what the launcher says already.
    for noisy in ("httpx", "httpcore", "asyncio", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if follows_parent:
        follow_parent()


def follow_parent() -> None:
    """Ends this process when its parent ends: by SIGTERM, and after a while at once.

    A parent that says who it is may have ended before this is called. What it says is not for this process's children.
    """
    parent = int(os.environ.pop(PARENT_VARIABLE, os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="xorl-parent", daemon=True).start()


def is_running(pid: int) -> bool:
    """Whether this host has a process of that id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def main() -> None:
    """`python -m xorl.server.process MODULE ARGUMENT...`: runs another's module as a process of the service."""
    del sys.argv[0]
    follow_parent()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
