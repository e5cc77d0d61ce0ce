"""summarise(): which kernels a profiled step spent its time in, and where the GPU was idle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile

TOP_KERNELS = 40
TOP_GAPS = 15


@dataclass(frozen=True)
class KernelTime:
    """Number of calls and total time of one kernel (on a CPU, of one operator)."""

    name: str
    count: int
    total_ms: float


@dataclass(frozen=True)
class IdleGap:
    """A time span without a running kernel, and the kernels before and after it."""

    ms: float
    after: str
    before: str


@dataclass(frozen=True)
class KernelSummary:
    """The kernels of one step.

    span_ms: from the start of the first kernel to the end of the last. busy_ms: the part of it in which at least one
    kernel ran. Kernels that overlap on several streams count in full in `kernels`, but only once in busy_ms.
    """

    device: str
    span_ms: float
    busy_ms: float
    kernels: Sequence[KernelTime]
    gaps: Sequence[IdleGap]


def summarise(recorded: profile) -> KernelSummary:
    """The kernels and idle gaps of a profile, longest first; operators and no gaps if nothing ran on a GPU."""
    events = recorded.events() or []
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    if not on_gpu:
        return _operators(events)
    kernels = sorted(on_gpu, key=lambda event: event.time_range.start)
    totals: dict[str, list[float]] = defaultdict(list)
    gaps: list[IdleGap] = []
    busy_us, end, last = 0.0, kernels[0].time_range.start, kernels[0].name
    for kernel in kernels:
        begin, finish = kernel.time_range.start, kernel.time_range.end
        totals[kernel.name].append(finish - begin)
        if begin > end:
            gaps.append(IdleGap((begin - end) / 1000, last, kernel.name))
        if finish > end:
            busy_us += finish - max(begin, end)
            end, last = finish, kernel.name
    span_us = end - kernels[0].time_range.start
    longest = sorted(gaps, key=lambda gap: -gap.ms)[:TOP_GAPS]
    return KernelSummary("cuda", span_us / 1000, busy_us / 1000, _ranked(totals), longest)


def _operators(events: Sequence[FunctionEvent]) -> KernelSummary:
    totals: dict[str, list[float]] = defaultdict(list)
    for event in events:
        totals[event.name].append(event.self_cpu_time_total)
    start = min((event.time_range.start for event in events), default=0.0)
    end = max((event.time_range.end for event in events), default=0.0)
    busy_us = sum(map(sum, totals.values()))
    return KernelSummary("cpu", (end - start) / 1000, busy_us / 1000, _ranked(totals), ())


def _ranked(totals: dict[str, list[float]]) -> Sequence[KernelTime]:
    times = [KernelTime(name, len(each), sum(each) / 1000) for name, each in totals.items()]
    return sorted(times, key=lambda time: -time.total_ms)[:TOP_KERNELS]
