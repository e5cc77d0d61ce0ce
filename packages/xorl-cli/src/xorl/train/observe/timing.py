"""StepTimer: measures the phases of a step with events that are queued among the work and read after it is done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Phase = Literal["forward", "backward", "pipeline", "comm", "optimizer"]
# The phases of every step; only a pipeline has the other one.
PHASES: tuple[Phase, ...] = ("forward", "backward", "comm", "optimizer")
# On a GPU, a position in the queue of work; on a CPU, where work is not queued, a time in seconds.
Moment = torch.cuda.Event | float


class Clock:
    """Measures times on a device. On a GPU, moments are events on the current stream, and only `wait` blocks the host.

    Events are reused, because creating one takes longer than recording it.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._free: list[torch.cuda.Event] = []

    def now(self) -> Moment:
        """The moment at which the work queued so far is done."""
        if not self._on_gpu:
            return time.perf_counter()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, moment: Moment) -> None:
        """Block until the work queued before `moment` is done."""
        if isinstance(moment, torch.cuda.Event):
            moment.synchronize()

    def seconds(self, earlier: Moment, later: Moment) -> float:
        """Seconds between two moments, both of which must have passed."""
        if isinstance(earlier, torch.cuda.Event):
            assert isinstance(later, torch.cuda.Event), "moments of one clock"
            return earlier.elapsed_time(later) / 1000
        assert isinstance(later, float), "moments of one clock"
        return later - earlier

    def free(self, moments: Sequence[Moment]) -> None:
        """Return moments that are no longer needed, for reuse."""
        self._free += [moment for moment in moments if isinstance(moment, torch.cuda.Event)]


def queue_copy(values: torch.Tensor) -> torch.Tensor:
    """A pinned host copy of `values`, valid once the device has executed all work queued so far. Does not block."""
    if not values.is_cuda:
        return values
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return copy.copy_(values, non_blocking=True)


@dataclass(frozen=True)
class StepMarks:
    """The marks of one step; `seconds` reads them once the work is done.

    ends: for each interval of work, its phase (None: not timed) and its end; it starts at the end of the previous one.
    waits: (index of the interval, begin, end) of every wait of the compute stream for a collective.
    """

    ends: Sequence[tuple[Phase | None, Moment]]
    waits: Sequence[tuple[int, Moment, Moment]]

    def seconds(self, clock: Clock) -> dict[Phase, float]:
        """Seconds by phase; waits for collectives count as comm. Returns the events to `clock`: call it once.

        "pipeline" is only there if stages waited for each other.
        """
        spent: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        for (_, earlier), (phase, later) in zip(self.ends, self.ends[1:], strict=False):
            if phase is not None:
                spent[phase] = spent.get(phase, 0.0) + clock.seconds(earlier, later)
        for interval, begin, end in self.waits:
            waited = clock.seconds(begin, end)
            phase = self.ends[interval][0] if interval < len(self.ends) else None
            if phase is not None:
                spent[phase] -= waited
                spent["comm"] += waited
        clock.free([moment for _, moment in self.ends] + [moment for _, *span in self.waits for moment in span])
        return spent


class StepTimer:
    """Marks the phases of a step on a device. The engine sets the marks; the observer that reports the step takes them.

    Marks that were not taken are dropped when the next step starts.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock(device)
        self._ends: list[tuple[Phase | None, Moment]] = []
        self._waits: list[tuple[int, Moment, Moment]] = []
        self._wait_began: Moment | None = None

    def start(self) -> None:
        """Start or continue a step; work since the previous mark belongs to no phase."""
        if self._ends and self._ends[-1][0] == "optimizer":
            self.take()
        self._ends.append((None, self.clock.now()))

    def mark(self, phase: Phase) -> None:
        """Assign the work queued since the previous mark to `phase`."""
        self._ends.append((phase, self.clock.now()))

    def begin_wait(self) -> None:
        """Mark that the compute stream starts to wait for a collective. Ignored between steps."""
        if not self._ends or self._ends[-1][0] == "optimizer":
            return
        self._wait_began = self.clock.now()

    def end_wait(self) -> None:
        """Mark the end of that wait. Ignored if no wait has started."""
        if self._wait_began is not None:
            self._waits.append((len(self._ends), self._wait_began, self.clock.now()))
            self._wait_began = None

    def take(self) -> StepMarks:
        """Return and clear the marks since the last call."""
        marks = StepMarks(self._ends, self._waits)
        self._ends, self._waits, self._wait_began = [], [], None
        return marks
