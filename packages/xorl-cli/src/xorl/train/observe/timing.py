"""StepTimer: measures where the time of a step goes, by events queued with the work and read once it is done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Phase = Literal["forward", "backward", "comm", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "comm", "optimizer")
# A point in the work that is queued on a GPU; on a CPU, where nothing is queued, a point in time in seconds.
Moment = torch.cuda.Event | float


class Clock:
    """Moments of a device's work. On a GPU they are events on the current stream; none makes the host wait but `wait`.

    Events are kept for use again: making one takes longer than recording it.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._free: list[torch.cuda.Event] = []

    def now(self) -> Moment:
        """The point in the work that has been queued up to here."""
        if not self._on_gpu:
            return time.perf_counter()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, moment: Moment) -> None:
        """Until the work queued before `moment` is done."""
        if isinstance(moment, torch.cuda.Event):
            moment.synchronize()

    def seconds(self, earlier: Moment, later: Moment) -> float:
        """From one moment to another, both of which have come."""
        if isinstance(earlier, torch.cuda.Event):
            assert isinstance(later, torch.cuda.Event), "moments of one clock"
            return earlier.elapsed_time(later) / 1000
        assert isinstance(later, float), "moments of one clock"
        return later - earlier

    def free(self, moments: Sequence[Moment]) -> None:
        """Takes back moments that nobody will ask about."""
        self._free += [moment for moment in moments if isinstance(moment, torch.cuda.Event)]


@dataclass(frozen=True)
class StepMarks:
    """The marks of one step; `seconds` reads them once the work is done.

    ends: for each stretch of work, its phase (None: no phase) and where it ends; it begins where the one before ends.
    waits: the stretch in which the device's queue stood still for a collective, and from where to where it did.
    """

    ends: Sequence[tuple[Phase | None, Moment]]
    waits: Sequence[tuple[int, Moment, Moment]]

    def seconds(self, clock: Clock) -> dict[Phase, float]:
        """Seconds by phase; what a stretch waited for collectives counts as comm. Gives the marks back to `clock`."""
        spent: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        for (_, earlier), (phase, later) in zip(self.ends, self.ends[1:], strict=False):
            if phase is not None:
                spent[phase] += clock.seconds(earlier, later)
        for stretch, begin, end in self.waits:
            waited = clock.seconds(begin, end)
            phase = self.ends[stretch][0] if stretch < len(self.ends) else None
            if phase is not None:
                spent[phase] -= waited
                spent["comm"] += waited
        clock.free([moment for _, moment in self.ends] + [moment for _, *span in self.waits for moment in span])
        return spent


class StepTimer:
    """Marks the phases of a step on a device. An engine makes the marks, whoever reports the step takes them.

    A step that nobody takes is forgotten when the next one starts.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock(device)
        self._ends: list[tuple[Phase | None, Moment]] = []
        self._waits: list[tuple[int, Moment, Moment]] = []
        self._wait_began: Moment | None = None

    def start(self) -> None:
        """The work of a step begins, or goes on: what lies between belongs to no phase."""
        if self._ends and self._ends[-1][0] == "optimizer":
            self.take()
        self._ends.append((None, self.clock.now()))

    def mark(self, phase: Phase) -> None:
        """What was queued since the mark before is `phase`."""
        self._ends.append((phase, self.clock.now()))

    def begin_wait(self) -> None:
        """From here on, the device's queue stands still for a collective. Between steps it is nobody's."""
        if not self._ends or self._ends[-1][0] == "optimizer":
            return
        self._wait_began = self.clock.now()

    def end_wait(self) -> None:
        """Until here it did; does nothing where no wait has begun."""
        if self._wait_began is not None:
            self._waits.append((len(self._ends), self._wait_began, self.clock.now()))
            self._wait_began = None

    def take(self) -> StepMarks:
        """The marks since the last call."""
        marks = StepMarks(self._ends, self._waits)
        self._ends, self._waits, self._wait_began = [], [], None
        return marks
