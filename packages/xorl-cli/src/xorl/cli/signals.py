"""What signals do to a process of xorl, unless the training loop takes them to save first."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from xorl.cli.exit_codes import TERMINATED, Terminated

PARENT_CHECK_S = 1.0
# What cleans up ends in this time. A rank that waits in torch for others that are gone runs no handler of Python's.
CLEAN_UP_S = 5.0


@contextmanager
def terminable() -> Iterator[None]:
    """While entered, SIGTERM raises Terminated in the main thread."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def import_torch() -> None:
    """Imports torch for the first time; a signal that comes meanwhile is not lost.

    torch imports numpy from C++ and drops what that raises, which would leave the process running on half of numpy.
    """
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        handler = handlers[signal.Signals(number)]
        assert callable(handler), "what is ignored stays so"
        handler(number, frame)

    heard = [number for number, handler in handlers.items() if callable(handler)]
    for number in heard:
        signal.signal(number, note)
    try:
        import torch  # noqa: F401, PLC0415  (takes seconds, and the configuration is checked before)
    finally:
        for number in heard:
            signal.signal(number, handlers[number])
        if received:
            signal.raise_signal(received[0])


@contextmanager
def stopping_with_parent(parent: int) -> Iterator[None]:
    """While entered, the end of the parent process acts as SIGTERM: a rank without its launcher would go on unseen.

    `parent` is the launcher's process, which may have ended before this is entered. A rank that does not leave in
    CLEAN_UP_S is ended, unless the training loop has taken the signal, to save.
    """
    handler = signal.getsignal(signal.SIGTERM)
    left = threading.Event()

    def watch() -> None:
        while os.getppid() == parent:
            if left.wait(PARENT_CHECK_S):
                return
        os.kill(os.getpid(), signal.SIGTERM)
        if not left.wait(CLEAN_UP_S) and signal.getsignal(signal.SIGTERM) is handler:
            os._exit(TERMINATED)

    threading.Thread(target=watch, name="xorl-parent", daemon=True).start()
    try:
        yield
    finally:
        left.set()


@contextmanager
def leaving_failed_peers(has_failed_peer: Callable[[], bool]) -> Iterator[None]:
    """While entered, SIGTERM ends the process at once if another rank of the job has failed.

    The main thread may then wait in a collective for ever, where Python runs no signal handler; nothing is left to save
    either. The signal is seen by a thread, through the file descriptor that the interpreter writes signals to.
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
