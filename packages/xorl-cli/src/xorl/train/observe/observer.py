"""Observer: reports the metrics of every step to sinks: metrics.jsonl, the progress bar, structured logs, wandb."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from xorl.train.engine import StepLosses, Update
from xorl.train.observe.devices import peak_flops
from xorl.train.observe.metrics_file import Metrics
from xorl.train.observe.timing import Moment, StepMarks, StepTimer, queue_copy
from xorl.train.observe.waits import StepWaits, WaitWatch

logger = logging.getLogger(__name__)

LogFormat = Literal["progress_bar", "structured"]
ItemT = TypeVar("ItemT")
MemberStep: TypeAlias = tuple[StepLosses, Update, float]
"""A step of a member of a sweep, and its learning rate."""


class DivergedError(RuntimeError):
    """The loss or gradient norm of a step is not finite. Its update was not applied."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"step {step}: {reason}")
        self.step = step
        self.reason = reason


def _raise(step: int, reason: str) -> None:
    raise DivergedError(step, reason)


class Sink(Protocol):
    """A destination for metrics."""

    def write(self, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


def key_values(metrics: Mapping[str, float | int | None]) -> str:
    """The metrics as `key=value` pairs for a log line; floats with five digits."""
    return " ".join(
        f"{key}={value:.5g}" if isinstance(value, float) else f"{key}={value}" for key, value in metrics.items()
    )


class _Scalars(NamedTuple):
    """The results of a step on the device, or of a member's part of it."""

    loss_sum: float
    num_terms: float
    num_trained_tokens: float
    num_tokens: float
    flops: float
    grad_norm: float
    skipped: float

    @property
    def is_finite(self) -> bool:
        return not self.skipped and math.isfinite(self.loss_sum)

    def metrics(self, step: int, lr: float | None) -> Metrics:
        return {
            "step": step,
            "loss": self.loss_sum / self.num_terms if self.num_terms else None,
            "grad_norm": self.grad_norm,
            "lr": lr,
            "num_tokens": int(self.num_tokens),
            "num_trained_tokens": int(self.num_trained_tokens),
        }


def _scalars(losses: StepLosses, update: Update) -> list[torch.Tensor]:
    """The fields of `_Scalars`, on the device."""
    return [*losses.sums.unbind(), update.grad_norm.double(), update.skipped.double()]


@dataclass
class _Pending:
    """A launched step that is not reported yet; its values can be read once the device has reached `end`."""

    step: int
    lr: float | None
    scalars: torch.Tensor
    further: tuple[str, ...]
    members: Mapping[str, float]
    marks: StepMarks
    end: Moment
    host_s: dict[str, float]


@dataclass
class Observer:
    """Turns the device scalars of each step into metrics; on a GPU, one step late, so that the host never waits.

    sinks: the destinations of metrics; only the main process has any. world_size: for MFU per device. timer: the
    engine's timer, for the phases of a step. waits: detects waits that are too long. A step with a non-finite loss or
    gradient norm is passed to `on_nonfinite` (step, reason) on every rank; by default that raises DivergedError.
    The metrics of a step of a sweep's member are passed to `on_member` (name, metrics, whether they are finite).
    `first` and `last` hold the first and the last value of every metric.

    The seconds of a step, measured by the reporting process:

    - time_s: from the end of the previous step (or of a pause) to the end of this one, on the device's clock: the sum
      of forward_s, backward_s, pipeline_s, comm_s, optimizer_s and idle_s.
    - forward_s, backward_s, optimizer_s: device time, without comm_s. Clipping counts as optimizer_s.
    - pipeline_s: the device waits for another stage; only with pipeline parallelism.
    - comm_s: exposed communication, in which the compute stream waits for collectives (see `core.parallel.exposed`),
      and summing the loss over ranks, which includes waiting for slower ranks. Overlapped communication is not counted.
    - idle_s: the rest, in which the device had no work: the host was launching it or waiting for data.
    - data_s: how long the host waited for the loader. On a GPU, this may overlap with the previous step.
    - checkpoint_s: the duration of a save right before this step; not part of time_s.
    """

    device: torch.device
    world_size: int
    sinks: list[Sink]
    timer: StepTimer
    on_nonfinite: Callable[[int, str], None] = _raise
    on_member: Callable[[str, Metrics, bool], None] = lambda name, metrics, is_finite: None
    waits: WaitWatch | None = None
    _pending: _Pending | None = None
    _nonfinite: list[tuple[int, str]] = field(default_factory=list)
    _mark: Moment = field(init=False)
    _host_s: dict[str, float] = field(init=False)
    _reported: StepWaits | None = None
    _start: float = field(default_factory=time.perf_counter)
    num_tokens: int = 0
    first: Metrics = field(default_factory=dict)
    last: Metrics = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._host_s = {"data_s": 0.0, "checkpoint_s": 0.0}
        self._mark = self.timer.clock.now()

    def start(self) -> None:
        """Start the clock of the first step."""
        self._mark = self.timer.clock.now()
        self._start = time.perf_counter()

    def fetched(self, steps: Iterable[ItemT]) -> Iterator[ItemT]:
        """Iterate over `steps` and measure the wait for each item, the data_s of its step."""
        begin = time.perf_counter()
        for item in steps:
            self._host_s["data_s"] = time.perf_counter() - begin
            yield item
            begin = time.perf_counter()

    def step(
        self,
        step: int,
        losses: StepLosses,
        update: Update,
        *,
        lr: float | None,
        members: Mapping[str, MemberStep] = MappingProxyType({}),
        metrics: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """Record the step that was just launched and report the previous one (on a CPU, this one).

        members: of a sweep; the step is then that of all of them. metrics: those of the loss, scalars on the device.
        """
        self._report()
        if self.waits is not None and self._reported is not None:
            self.waits.step(self._reported)
        further = {**({} if losses.routers is None else losses.routers.metrics()), **metrics}
        of_members = [scalar for own, outcome, _ in members.values() for scalar in _scalars(own, outcome)]
        scalars = queue_copy(torch.stack([*_scalars(losses, update), *of_members, *further.values()]))
        end, rates = self.timer.clock.now(), {name: rate for name, (_, _, rate) in members.items()}
        self._pending = _Pending(step, lr, scalars, tuple(further), rates, self.timer.take(), end, self._host_s)
        self._host_s = {"data_s": 0.0, "checkpoint_s": 0.0}
        if self.device.type == "cpu":
            self._report()  # the step is already done; later work must not count towards its time
        self._handle_nonfinite()

    def flush(self) -> None:
        """Wait for the pending step, if any, and report it."""
        self._report()
        self._handle_nonfinite()

    def _handle_nonfinite(self) -> None:
        steps, self._nonfinite = self._nonfinite, []
        for step, reason in steps:
            self.on_nonfinite(step, reason)

    def _report(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        clock = self.timer.clock
        begin = time.perf_counter()
        clock.wait(pending.end)
        ahead = time.perf_counter() - begin
        values = iter(pending.scalars.tolist())
        step, *of_members = [_Scalars(*islice(values, len(_Scalars._fields))) for _ in ("", *pending.members)]
        elapsed, spent = clock.seconds(self._mark, pending.end), pending.marks.seconds(clock)
        clock.free([self._mark])
        self._mark = pending.end
        self.num_tokens += int(step.num_tokens)
        peak = peak_flops(self.device)
        metrics: Metrics = {
            **step.metrics(pending.step, pending.lr),
            "tokens_per_s": step.num_tokens / elapsed,
            "mfu": step.flops / elapsed / (peak * self.world_size) if peak else None,
            "peak_memory_gib": _peak_memory_gib(self.device),
            **dict(zip(pending.further, values, strict=True)),
            "time_s": elapsed,
            **{f"{phase}_s": seconds for phase, seconds in spent.items()},
            "idle_s": elapsed - sum(spent.values()),
            **pending.host_s,
        }
        if "time_s" not in self.first:
            logger.debug("phase=first_step done_s=%.2f", elapsed)
        self._reported = StepWaits(elapsed, spent["comm"], ahead)
        self.write(metrics)
        for (name, lr), scalars in zip(pending.members.items(), of_members, strict=True):
            self.on_member(name, scalars.metrics(pending.step, lr), scalars.is_finite)
        if not step.is_finite:
            self._nonfinite.append((pending.step, f"loss {metrics['loss']}, gradient norm {step.grad_norm}"))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the time of the block, such as an evaluation, from the time of the steps."""
        self.flush()
        yield
        self._mark = self.timer.clock.now()

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Excludes saving a checkpoint from the time of the steps; it is the checkpoint_s of the next step."""
        with self.pause():
            begin = time.perf_counter()
            yield
            self._host_s["checkpoint_s"] = time.perf_counter() - begin

    def write(self, metrics: Metrics) -> None:
        """Send one record to every sink."""
        self.first = {**metrics, **self.first}
        self.last = {**self.last, **metrics}
        for sink in self.sinks:
            sink.write(metrics)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start


def _peak_memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # Linux only: the peak resident set size of this process.
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("VmHWM:")), 0.0)
