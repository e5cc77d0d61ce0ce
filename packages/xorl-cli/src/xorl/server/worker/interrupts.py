"""Reasons to end or suspend the ranks' work before it is finished: cancellations, and other work that waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass

from xorl.server.messages import Work

# Work runs for at least this long before it gives way to other work, so that suspending it costs little.
MIN_SLICE_S = 0.1


@dataclass(frozen=True)
class Interrupts:
    """Rank 0's view. Other ranks have none, and follow rank 0's decisions.

    cancelled: ids of cancelled operations; may grow during the work. others_wait: whether other work has arrived.
    """

    cancelled: Container[str] = ()
    others_wait: Callable[[], bool] = lambda: False

    def pauses(self, work: Work) -> Callable[[], bool]:
        """Returns a function that tells whether `work`, which begins now, should give way to other work."""
        pause_from = time.monotonic() + MIN_SLICE_S
        return lambda: work.may_suspend and time.monotonic() > pause_from and self.others_wait()


NO_INTERRUPTS = Interrupts()
