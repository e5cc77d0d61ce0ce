"""Signal handling of xorl's processes. The training loop installs its own handlers, to save before stopping."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from xorl.cli.exit_codes import TERMINATED, Terminated

PARENT_CHECK_S = 1.0
# Time for cleanup before a rank is killed: while it waits in torch for dead ranks, no Python signal handler runs.
CLEAN_UP_S = 5.0


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """While entered, SIGTERM raises Terminated in the main thread."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def import_torch() -> None:
    """Imports torch for the first time without losing a signal that arrives meanwhile.

    torch imports numpy from C++ and discards exceptions from that import, so an interruption there would leave the
    process running with a partially imported numpy.
    """
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        handler = handlers[signal.Signals(number)]
        assert callable(handler), "ignored signals are not replaced"
        handler(number, frame)

    handled = [number for number, handler in handlers.items() if callable(handler)]
    for number in handled:
        signal.signal(number, note)
    try:
        import torch  # noqa: F401, PLC0415  (slow; after validation)
    finally:
        for number in handled:
            signal.signal(number, handlers[number])
        if received:
            signal.raise_signal(received[0])


@contextmanager
def stop_with_parent(parent: int) -> Iterator[None]:
    """While entered, sends SIGTERM to this process when its parent ends, so that no rank outlives its launcher.

    `parent` is the launcher's process id; the launcher may have ended before this is entered. A rank that does not exit
    within CLEAN_UP_S is ended, unless the training loop handles the signal in order to save.
    """
    handler = signal.getsignal(signal.SIGTERM)
    exited = threading.Event()

    def watch() -> None:
        while os.getppid() == parent:
            if exited.wait(PARENT_CHECK_S):
                return
        os.kill(os.getpid(), signal.SIGTERM)
        if not exited.wait(CLEAN_UP_S) and signal.getsignal(signal.SIGTERM) is handler:
            os._exit(TERMINATED)

    threading.Thread(target=watch, name="xorl-parent", daemon=True).start()
    try:
        yield
    finally:
        exited.set()


@contextmanager
def exit_on_sigterm_after_peer_failure(has_failed_peer: Callable[[], bool]) -> Iterator[None]:
    """While entered, SIGTERM ends the process immediately if another rank of the job has failed.

    The main thread may be stuck in a collective, where Python runs no signal handlers, and the job cannot save without
    the failed rank. A thread receives the signal through the interpreter's wakeup file descriptor.
    """
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)

    def watch() -> None:
        while True:
            numbers = os.read(receiver, 64)
            if not numbers:
                return
            if signal.SIGTERM in numbers and has_failed_peer():
                os._exit(TERMINATED)

    previous = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="xorl-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(sender)
        thread.join()
        os.close(receiver)
