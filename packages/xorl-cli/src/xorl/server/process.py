"""Setup shared by all processes of the service: the log format, and ending together with the parent process."""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
import threading
import time

from xorl.config.fields import LogLevel
from xorl.host.parent import signal_at_end_of_parent

PARENT_VARIABLE = "XORL_PARENT"  # environment variable with the id of the parent process
PARENT_CHECK_S = 0.5
GRACE_S = 20.0  # between SIGTERM and SIGKILL, to finish saving; a process in a collective does not react to SIGTERM


def configure_logging(name: str, log_level: LogLevel) -> None:
    """Log to standard error in the service's format, with the name of this process."""
    logging.basicConfig(
        level=log_level,
        format=f"%(asctime)s level=%(levelname)s process={name} %(message)s",
        stream=sys.stderr,
        force=True,
    )
    # At INFO, these log every request and repeat the launcher's messages.
    for noisy in ("httpx", "httpcore", "asyncio", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def follow_parent() -> None:
    """When the parent process ends, end this one: with SIGTERM, and after GRACE_S with SIGKILL.

    PARENT_VARIABLE names the parent, since it may have ended before this call. It is removed from the environment so
    that children do not inherit it.
    """
    parent = int(os.environ.pop(PARENT_VARIABLE, os.getppid()))
    signal_at_end_of_parent(signal.SIGCONT)  # a stopped process would not notice its parent's end

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="xorl-parent", daemon=True).start()


def is_running(pid: int) -> bool:
    """Whether a process with this id exists on this host."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def main() -> None:
    """`python -m xorl.server.process MODULE ARGUMENT...`: runs a module as a process of the service."""
    del sys.argv[0]
    follow_parent()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
