"""Importing torch in a process that may be told to stop meanwhile."""

import gc
import signal
from types import FrameType

from xorl.host.signals import STOP_SIGNALS


def import_torch() -> None:
    """Imports torch for the first time without losing a signal that arrives meanwhile.

    torch imports numpy from C++ and discards exceptions from that import, so an interruption there would leave the
    process running with a partially imported numpy.

    The garbage collector is off meanwhile and ignores these modules' objects afterwards, which all stay: a rank spends
    2.6 s instead of 3.4 s on its imports, and a collection, for which other ranks wait, takes half as long.
    """
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        handler = handlers[signal.Signals(number)]
        assert callable(handler), "ignored signals are not replaced"
        handler(number, frame)

    handled = [number for number, handler in handlers.items() if callable(handler)]
    for number in handled:
        signal.signal(number, note)
    gc.disable()
    try:
        import torch  # noqa: F401, PLC0415  (slow; after validation)
    finally:
        gc.enable()
        gc.freeze()
        for number in handled:
            signal.signal(number, handlers[number])
        if received:
            signal.raise_signal(received[0])
