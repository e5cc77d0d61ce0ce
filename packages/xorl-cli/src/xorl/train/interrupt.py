"""Ends a run on a signal, or before `train.max_time`, at a step that all ranks agree on, so that it is saved first.

Also lets all ranks learn at the same step that a save in the background has failed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist

from xorl.host.signals import REPEATED_S, STOP_SIGNALS, raised_signal

# Stands for `train.max_time` where a signal's number says why a run ended.
OUT_OF_TIME = signal.SIGALRM


class Interrupted(Exception):
    """A signal interrupted work that can be repeated, such as an evaluation."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"signal {signal_number}")
        self.signal_number = signal_number


class Interruption:
    """Catches the first signal while entered. A second one, at least REPEATED_S later, has its usual effect.

    `has_failed` tells whether a save of this rank has failed; `save_failed` is whether one of any rank had failed, as
    of the last exchange. `is_out_of_time` tells whether the run must end now, as if it had received OUT_OF_TIME; it is
    called once for each exchange.
    """

    def __init__(
        self, has_failed: Callable[[], bool] = lambda: False, is_out_of_time: Callable[[], bool] = lambda: False
    ) -> None:
        self._received = 0
        self._since = 0.0
        self._has_failed = has_failed
        self._is_out_of_time = is_out_of_time
        self.save_failed = False
        self._flags = torch.zeros(2, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interruption:
        self._received, self._since = raised_signal(), time.monotonic()
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self._finish()  # after an error, the other ranks may never reach the exchange
        self._restore()

    def agreed_signal(self) -> int:
        """The signal that any rank had received by the previous call, or 0; the same on every rank. Collective.

        Each call starts an exchange that the next call reads, so no rank waits for it.
        """
        signal_number = self._finish()
        if self._is_out_of_time():
            self._received = self._received or OUT_OF_TIME
        self._flags = torch.tensor([self._received, self._has_failed()], dtype=torch.int32)
        self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, async_op=True)
        return signal_number

    def check(self) -> None:
        """Raise Interrupted once the ranks agree on a signal. Call it regularly during long work. Collective."""
        if signal_number := self.agreed_signal():
            raise Interrupted(signal_number)

    def _finish(self) -> int:
        if self._work is None:
            return 0
        self._work.wait()
        self._work = None
        signal_number, save_failed = self._flags.tolist()
        self.save_failed = bool(save_failed)
        return signal_number

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
