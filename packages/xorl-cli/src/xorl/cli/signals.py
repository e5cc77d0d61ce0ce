"""Signal handling of xorl's processes. The training loop installs its own handlers, to save before stopping."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from xorl.cli.exit_codes import BY_SIGNAL, Terminated
from xorl.host.signals import REPEATED_S, STOP_SIGNALS, forget_raised, note_raised

# Time for cleanup, and for native code to return to Python, which alone runs handlers.
CLEAN_UP_S = 5.0


@contextmanager
def raise_on_signal() -> Iterator[Callable[[], bool]]:
    """While entered, SIGTERM and SIGUSR1 raise Terminated in the main thread, and SIGINT KeyboardInterrupt.

    Each signal is also recorded (`raised_signal`), because Python discards exceptions that are raised in callbacks such
    as those around a fork. Yields a function that tells whether other code handles SIGTERM by now.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        note_raised(number)
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)

    forget_raised()
    # A job in the background of a shell ignores SIGINT.
    raised = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, terminate) for number in raised}
    try:
        yield lambda: signal.getsignal(signal.SIGTERM) is not terminate
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        forget_raised()


@contextmanager
def exit_if_stuck(
    may_take_long: Callable[[], bool], has_failed_peer: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """While entered, a signal to stop ends the process even if its main thread never returns to Python.

    Python runs signal handlers in the main thread only, which may wait in native code for another process. Here, a
    thread receives the signals through the interpreter's wakeup file descriptor, and ends the process

    - at once if `has_failed_peer()`: a rank waits for one that is gone, and cannot save without it;
    - CLEAN_UP_S after the first signal, unless `may_take_long()` by then: the process has heard it and is saving;
    - CLEAN_UP_S after a second signal.
    """
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    exited = threading.Event()

    def end_later(number: int, *, is_repeated: bool) -> None:
        if not exited.wait(CLEAN_UP_S) and (is_repeated or not may_take_long()):
            os._exit(BY_SIGNAL + number)

    def watch() -> None:
        first_s: float | None = None
        while numbers := os.read(receiver, 64):
            for number in STOP_SIGNALS:
                if number not in numbers:
                    continue
                if has_failed_peer():
                    os._exit(BY_SIGNAL + number)
                now = time.monotonic()
                first_s = now if first_s is None else first_s
                is_repeated = now - first_s >= REPEATED_S
                arguments = {"is_repeated": is_repeated}
                threading.Thread(target=end_later, args=(number,), kwargs=arguments, daemon=True).start()

    previous = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="xorl-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        exited.set()
        signal.set_wakeup_fd(previous)
        os.close(sender)
        thread.join()
        os.close(receiver)


@contextmanager
def interactive() -> Iterator[None]:
    """While entered, Ctrl-C only raises KeyboardInterrupt, and is no signal to stop for `exit_if_stuck`.

    Other signals are handled as before.
    """
    watched = signal.set_wakeup_fd(-1)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        signal.set_wakeup_fd(watched, warn_on_full_buffer=False)


@contextmanager
def note_interrupt() -> Iterator[Callable[[], bool]]:
    """While entered, the first Ctrl-C raises nothing; yields a function that tells whether there was one.

    A second one raises KeyboardInterrupt, in case the function is never called.
    """
    is_interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            signal.default_int_handler(number, frame)
        is_interrupted = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: is_interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
