"""exit_with_parent: worker processes end as soon as the process that started them does, even if it was killed."""

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait


def exit_with_parent() -> None:
    """Ends this process, started by multiprocessing, when its parent ends, and on SIGTERM without a traceback.

    Until then, both hold the parent's locks.
    """
    # A forked process has the handlers of its parent, whose clean-up is not its own.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a child process"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="xorl-parent", daemon=True).start()
