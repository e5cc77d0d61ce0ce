"""Infers the numbers of refused requests that could not be read, so that later requests do not wait for them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from xorl.server.orchestrator.scheduler import Scheduler


class UnreadableRequests:
    """The times at which unreadable requests were refused, by source, for at most max_age_s."""

    def __init__(self, scheduler: Scheduler, max_age_s: float) -> None:
        self._scheduler = scheduler
        self._max_age_s = max_age_s
        self._times: dict[str, list[float]] = {}

    def note(self, source: str) -> None:
        """Remember that a request of this source has just been refused."""
        self._times.setdefault(source, []).append(time.monotonic())

    def missing_numbers(self, source: str) -> tuple[str, Sequence[int]]:
        """Infer the lane and numbers of this source's unreadable requests, which are then forgotten.

        Returns ("", ()) unless exactly one lane of the source waits for numbers, and for no more numbers than there
        were unreadable requests: otherwise, a missing number may still arrive.
        """
        since = time.monotonic() - self._max_age_s
        recent = {name: [when for when in times if when > since] for name, times in self._times.items()}
        self._times = {name: times for name, times in recent.items() if times}
        if source not in self._times:
            return "", ()
        gaps = self._scheduler.gaps_behind(source)
        if len(gaps) != 1:
            return "", ()
        ((lane, gap),) = gaps.items()
        first_waiting = gap.waiting[0].seq
        assert first_waiting is not None, "only numbered requests wait for a number"
        missing = [seq for seq in range(gap.seq, first_waiting) if self._scheduler.admits(lane, seq)]
        if len(missing) > len(self._times[source]):
            return "", ()
        del self._times[source][: len(missing)]
        return lane, missing
