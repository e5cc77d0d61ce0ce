"""The training loop of a sweep: adapters train together on one frozen base, each as in a separate run."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xorl.core.loss import LossFn, LossOutput
from xorl.core.optim import Schedule
from xorl.core.parallel import ParallelModel
from xorl.core.runtime import GarbageCollection
from xorl.data import PackedBatch, StepLoader
from xorl.lora import Adam
from xorl.train.bank_engine import BankEngine, MixedBatch
from xorl.train.engine import StepLosses, Update
from xorl.train.evaluate import Evaluation, evaluate
from xorl.train.interrupt import Interrupted, Interruption
from xorl.train.observe.metrics_file import Metrics, MetricsFile
from xorl.train.observe.observer import DivergedError, Observer
from xorl.train.observe.profile import Profiler
from xorl.train.observe.timing import queue_copy
from xorl.train.startup import Startup
from xorl.train.sweep.saving import SweepSaving

logger = logging.getLogger(__name__)

MemberBatches = Mapping[str, Sequence[PackedBatch]]


@dataclass
class Member:
    """One member of a sweep, with the parts of a run that it does not share.

    diverged: its loss or gradient was not finite. Its weights stay as before that step, and it takes no more steps.
    """

    name: str
    loader: StepLoader
    evaluation: Evaluation | None
    schedule: Schedule
    num_steps: int
    weight_decay: float
    metrics: MetricsFile | None
    diverged: bool
    first: Metrics = field(default_factory=dict)
    last: Metrics = field(default_factory=dict)

    def write(self, metrics: Metrics) -> None:
        """Record the metrics of a step or an evaluation; only the main process has a file."""
        self.first, self.last = {**metrics, **self.first}, {**self.last, **metrics}
        if self.metrics is not None:
            self.metrics.write(metrics)


@dataclass(frozen=True)
class MemberScorer:
    """Evaluates the model with one adapter."""

    engine: BankEngine
    name: str

    @property
    def model(self) -> ParallelModel:
        return self.engine.model

    @property
    def device(self) -> torch.device:
        return self.engine.device

    def forward(self, batch: PackedBatch, loss_fn: LossFn) -> LossOutput | None:
        """The loss of a micro-batch with this adapter; collective where parameters are sharded."""
        return self.engine.forward(MixedBatch.of([(self.name, batch)]), loss_fn)


@dataclass(frozen=True)
class Sweep:
    """A sweep that is ready to train: see `train_sweep`."""

    startup: Startup
    engine: BankEngine
    loss_fn: LossFn
    members: Sequence[Member]
    observer: Observer
    saving: SweepSaving
    profiler: Profiler
    start_step: int

    def active(self, step: int) -> list[Member]:
        """The members that still train at `step`, counted from 1; the same on every rank."""
        return [member for member in self.members if step <= member.num_steps and not member.diverged]

    def close(self) -> None:
        self.observer.close()
        for member in self.members:
            if member.metrics is not None:
                member.metrics.close()

    def save(self, step: int, *, is_final: bool) -> None:
        diverged = [member.name for member in self.members if member.diverged]
        self.saving.save(step, diverged=diverged, is_final=is_final)

    def steps(self) -> Iterator[tuple[int, MemberBatches]]:
        """Yield each step, counted from 1, with the micro-batches of each member that takes it."""
        loaders = {member.name: member.loader for member in self.members if self.start_step < member.num_steps}
        batches = {name: loader.steps(start=self.start_step) for name, loader in loaders.items()}
        for step in range(self.start_step + 1, self.startup.num_steps + 1):
            yield step, {member.name: next(batches[member.name])[1] for member in self.active(step)}


def mix(batches: MemberBatches, members_per_pass: int) -> Iterator[MixedBatch]:
    """Join the first micro-batches of all members, then the second ones, with at most `members_per_pass` in each.

    Every rank yields the same number, since each member has the same number of micro-batches on every rank.
    """
    for index in range(max(map(len, batches.values()))):
        parts = [(name, queue[index]) for name, queue in batches.items() if index < len(queue)]
        for start in range(0, len(parts), members_per_pass):
            yield MixedBatch.of(parts[start : start + members_per_pass])


def train_sweep(sweep: Sweep) -> int:
    """Train to the last step of every member. Collective. Returns the signal that ended it early, or 0.

    Signals and interrupted evaluations are handled as in `loop.train`. After the last step the adapters are exported.
    Raises DivergedError once every member has diverged.
    """
    engine, observer, config, saves = sweep.engine, sweep.observer, sweep.startup.config, sweep.saving.saves
    report, at = _MemberObserver(sweep), sweep.startup.position
    active = sweep.active(max(sweep.start_step, 1))
    pending = [member for member in active if member.evaluation is not None and member.evaluation.at_start]
    _evaluate(sweep, report, sweep.start_step, pending, None)
    with (
        Interruption(saves.has_failed, sweep.startup.deadline(saves)) as interruption,
        saves.flushed(),
        GarbageCollection(config.train.gc_steps, config.train.empty_cache_steps) as garbage,
        sweep.profiler,
    ):
        observer.start()
        at.move("data", sweep.start_step + 1)
        for step, batches in observer.fetched(sweep.steps()):
            if not batches:
                # All members with steps left have diverged, so the sweep ends with the step before.
                with observer.checkpoint():
                    sweep.save(step - 1, is_final=True)
                break
            at.move("forward and backward", step)
            mixed = mix(batches, config.lora.sweep_members_per_pass or len(sweep.members))
            losses = engine.forward_backward(mixed, sweep.loss_fn, list(batches))
            at.move("update")
            rates = {member.name: member.schedule(step) for member in sweep.members if member.name in batches}
            saves.before_change()
            updates = {
                member.name: engine.optim_step(
                    member.name,
                    Adam(lr=rates[member.name], weight_decay=member.weight_decay),
                    losses[member.name].divisor,
                    config.train.max_grad_norm,
                )
                for member in sweep.members
                if member.name in batches
            }
            report.step(step, losses, updates, rates)
            signal_number = interruption.agreed_signal()
            if interruption.save_failed:
                saves.finish()
            is_saved = bool(signal_number) or sweep.saving.due(step)
            if is_saved:
                _save(sweep, report, step, is_final=bool(signal_number) or step == sweep.startup.num_steps)
            if signal_number and step < sweep.startup.num_steps:
                return signal_number
            active = sweep.active(step)
            due = [member for member in active if member.evaluation is not None and member.evaluation.due(step)]
            try:
                _evaluate(sweep, report, step, due, interruption)
            except Interrupted as interrupted:
                if not is_saved:
                    _save(sweep, report, step, is_final=True)
                return interrupted.signal_number
            garbage.step(step)
            sweep.profiler.step(step)
            at.move("data", step + 1)
        report.flush()
        at.move("export")
        sweep.saving.export([member.name for member in sweep.members if not member.diverged])
    return 0


def _save(sweep: Sweep, report: _MemberObserver, step: int, *, is_final: bool) -> None:
    sweep.startup.position.move("save")
    with sweep.observer.checkpoint():
        report.flush()
        sweep.save(step, is_final=is_final)


def _evaluate(
    sweep: Sweep, report: _MemberObserver, step: int, members: Sequence[Member], interruption: Interruption | None
) -> None:
    """Score the held-out data of these members. Raises Interrupted if a signal arrives meanwhile."""
    if not members:
        return
    position = sweep.startup.position

    def check() -> None:
        position.move("evaluation")
        if interruption is not None:
            interruption.check()

    with sweep.observer.pause():
        report.flush()
        for member in members:
            assert member.evaluation is not None
            scorer = MemberScorer(sweep.engine, member.name)
            scores = evaluate(scorer, member.evaluation.loader, check)
            member.write({"step": step, **scores})


class _MemberObserver:
    """Turns the device scalars of each step into metrics of each member; on a GPU one step late, like the observer."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._pending: list[tuple[int, dict[str, float], Tensor]] = []

    def step(
        self, step: int, losses: Mapping[str, StepLosses], updates: Mapping[str, Update], rates: dict[str, float]
    ) -> None:
        """Add a step that was just launched, and report the one before (on a CPU, this one)."""
        sums = torch.stack(
            [torch.stack([row.loss_sum, row.num_trained_tokens, row.num_tokens, row.flops]) for row in losses.values()]
        )
        outcomes = torch.stack([torch.stack([row.grad_norm, row.skipped]).double() for row in updates.values()])
        is_finite = (torch.isfinite(sums[:, 0]) & (outcomes[:, 1] == 0))[:, None]
        joint = torch.where(is_finite, sums, 0).sum(dim=0)
        norm = torch.where(is_finite, outcomes, 0)[:, 0].square().sum().sqrt()
        earlier, self._pending = self._pending, [(step, rates, queue_copy(torch.cat([sums, outcomes], dim=1)))]
        # The observer waits for the step before (on a CPU, for this one), so its scalars are then on the host.
        self._sweep.observer.step(
            step, StepLosses.of(joint), Update(norm, torch.zeros_like(norm)), lr=max(rates.values())
        )
        self._write(earlier)
        if self._sweep.engine.device.type == "cpu":
            self.flush()

    def flush(self) -> None:
        """Report the pending step after the observer has waited for it."""
        self._sweep.observer.flush()
        earlier, self._pending = self._pending, []
        self._write(earlier)

    def _write(self, steps: list[tuple[int, dict[str, float], Tensor]]) -> None:
        members = {member.name: member for member in self._sweep.members}
        for step, rates, scalars in steps:
            for (name, rate), row in zip(rates.items(), scalars.tolist(), strict=True):
                loss_sum, trained, tokens, _, norm, skipped = row
                loss = loss_sum / trained if trained else None
                members[name].write(
                    {
                        "step": step,
                        "loss": loss,
                        "grad_norm": norm,
                        "lr": rate,
                        "num_tokens": int(tokens),
                        "num_trained_tokens": int(trained),
                    }
                )
                if (skipped or not math.isfinite(loss_sum)) and not members[name].diverged:
                    members[name].diverged = True
                    logger.warning(
                        "member=%s diverged at step=%d: it takes no more steps; lower its lr or check its data",
                        name,
                        step,
                    )
        if steps and all(member.diverged for member in members.values()):
            raise DivergedError(steps[-1][0], "no member has a finite loss and gradient; lower train.lr")
