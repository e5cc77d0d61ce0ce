"""SIGTERM and SIGINT end a run at a step that all ranks agree on, so that it can be saved first."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

REPEATED_S = 3.0


class Interrupted(Exception):
    """A signal came while something was done that can be done again."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"signal {signal_number}")
        self.signal_number = signal_number


class Interruption:
    """Catches the first signal while entered. A second one, at least REPEATED_S later, acts as usual.

    One that comes sooner counts as the same: who ends a job often signals both its launcher, which signals the ranks,
    and the ranks.
    """

    def __init__(self) -> None:
        self._received = 0
        self._since = 0.0
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self._finish()  # after an error, the other ranks may never come
        self._restore()

    def agreed(self) -> int:
        """The signal that any rank had received one step ago, or 0; the same on every rank. Collective.

        The exchange that is started at one step is read at the next, so no rank waits for it.
        """
        signal_number = self._finish()
        self._flag = torch.tensor([self._received], dtype=torch.int32)
        self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, async_op=True)
        return signal_number

    def check(self) -> None:
        """Raise Interrupted once a signal is agreed upon; to be called now and then in what takes long. Collective."""
        if signal_number := self.agreed():
            raise Interrupted(signal_number)

    def _finish(self) -> int:
        if self._work is None:
            return 0
        self._work.wait()
        self._work = None
        return int(self._flag.item())

    def _receive(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if not self._received:
            self._received, self._since = number, now
        elif now - self._since >= REPEATED_S:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
