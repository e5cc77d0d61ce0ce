"""The training loop of a sweep: adapters that train together on one frozen base, each as in a run of its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from xorl.config import Config
from xorl.core.loss import LossFn, LossOutput
from xorl.core.optim import Schedule
from xorl.core.parallel import ParallelModel
from xorl.core.runtime import GarbageCollection, Runtime
from xorl.data import PackedBatch, StepLoader
from xorl.lora import Adam
from xorl.train.bank_engine import BankEngine, MixedBatch
from xorl.train.engine import StepLosses, Update
from xorl.train.evaluate import EvalPoints, evaluate
from xorl.train.interrupt import Interrupted, Interruption
from xorl.train.observe.observer import DivergedError, Metrics, MetricsFile, Observer, queue_copy
from xorl.train.observe.profile import Profiler
from xorl.train.sweep.saving import SweepSaving

logger = logging.getLogger(__name__)

MemberBatches = Mapping[str, Sequence[PackedBatch]]


@dataclass
class Member:
    """One member of a sweep, with what its own run would have.

    evaluates_first: whether the step that the sweep starts from is still to be evaluated.
    diverged: its loss or gradient was not finite. It keeps the values that it had before, and takes no more steps.
    """

    name: str
    config: Config
    loader: StepLoader
    eval_loader: StepLoader | None
    schedule: Schedule
    num_steps: int
    evaluates_after: EvalPoints
    metrics: MetricsFile | None
    evaluates_first: bool = True
    diverged: bool = False
    first: Metrics = field(default_factory=dict)
    last: Metrics = field(default_factory=dict)

    def write(self, metrics: Metrics) -> None:
        """Record one line; only the main process has a file."""
        self.first, self.last = {**metrics, **self.first}, {**self.last, **metrics}
        if self.metrics is not None:
            self.metrics.write(metrics)


@dataclass(frozen=True)
class MemberScorer:
    """The model with one adapter, for evaluations."""

    engine: BankEngine
    name: str

    @property
    def model(self) -> ParallelModel:
        return self.engine.model

    @property
    def device(self) -> torch.device:
        return self.engine.device

    def forward(self, batch: PackedBatch, loss_fn: LossFn) -> LossOutput:
        """The loss of a micro-batch with this adapter; collective where parameters are sharded."""
        return self.engine.forward(MixedBatch.of([(self.name, batch)]), loss_fn)


@dataclass(frozen=True)
class Sweep:
    """A sweep that is ready to train."""

    runtime: Runtime
    engine: BankEngine
    loss_fn: LossFn
    score_fn: LossFn
    members: Sequence[Member]
    observer: Observer
    saving: SweepSaving
    profiler: Profiler
    config: Config
    output_dir: Path
    num_steps: int
    start_step: int

    def active(self, step: int) -> list[Member]:
        """The members that take step `step`, counted from 1; the same on every rank."""
        return [member for member in self.members if step <= member.num_steps and not member.diverged]

    def close(self) -> None:
        """Close all files."""
        self.observer.close()
        for member in self.members:
            if member.metrics is not None:
                member.metrics.close()

    def save(self, step: int) -> None:
        """Save every member after `step` steps; collective."""
        self.saving.save(step, diverged=[member.name for member in self.members if member.diverged])

    def steps(self) -> Iterator[tuple[int, MemberBatches]]:
        """(step, counted from 1, the micro-batches of each member that takes it)."""
        loaders = {member.name: member.loader for member in self.members if self.start_step < member.num_steps}
        batches = {name: loader.steps(start=self.start_step) for name, loader in loaders.items()}
        for step in range(self.start_step + 1, self.num_steps + 1):
            yield step, {member.name: next(batches[member.name])[1] for member in self.active(step)}


def mix(batches: MemberBatches, members_per_pass: int) -> Iterator[MixedBatch]:
    """The micro-batches of a step, joined: the first of each member, then the second, at most so many members at once.

    Each rank has as many as the others, since each has the same number of every member.
    """
    for index in range(max(map(len, batches.values()))):
        parts = [(name, own[index]) for name, own in batches.items() if index < len(own)]
        for start in range(0, len(parts), members_per_pass):
            yield MixedBatch.of(parts[start : start + members_per_pass])


def train_sweep(sweep: Sweep) -> int:
    """Train to the last step of every member. Collective. Returns the signal that ended it early, or 0.

    A signal ends the sweep after the current step, which is saved, and evaluations are made up for, as by
    `loop.train`; after the last step the adapters are exported.
    Raises DivergedError if no member has a finite loss and gradient any more.
    """
    engine, observer, train = sweep.engine, sweep.observer, sweep.config.train
    report = _Report(sweep)
    first = [member for member in sweep.active(max(sweep.start_step, 1)) if member.evaluates_first]
    _evaluate(sweep, report, sweep.start_step, first, None)
    with (
        Interruption() as interruption,
        GarbageCollection(train.gc_steps, train.empty_cache_steps) as garbage,
        sweep.profiler,
    ):
        observer.start()
        for step, batches in observer.fetched(sweep.steps()):
            if not batches:
                # All that is left has diverged: the steps taken so far are all there are.
                with observer.checkpoint():
                    sweep.save(step - 1)
                break
            mixed = mix(batches, sweep.config.lora.sweep_members_per_pass or len(sweep.members))
            losses = engine.forward_backward(mixed, sweep.loss_fn, list(batches))
            rates = {member.name: member.schedule(step) for member in sweep.members if member.name in batches}
            updates = {
                member.name: engine.optim_step(
                    member.name,
                    Adam(lr=rates[member.name], weight_decay=member.config.train.weight_decay),
                    _divisor(losses[member.name]),
                    train.max_grad_norm,
                )
                for member in sweep.members
                if member.name in batches
            }
            report.step(step, losses, updates, rates)
            signal_number = interruption.agreed()
            is_saved = bool(signal_number) or sweep.saving.due(step)
            if is_saved:
                _save(sweep, report, step)
            if signal_number and step < sweep.num_steps:
                return signal_number
            try:
                due = [member for member in sweep.active(step) if member.evaluates_after(step)]
                _evaluate(sweep, report, step, due, interruption)
            except Interrupted as interrupted:
                if not is_saved:
                    _save(sweep, report, step)
                return interrupted.signal_number
            garbage.step(step)
            sweep.profiler.step(step)
        report.flush()
        sweep.saving.export([member.name for member in sweep.members if not member.diverged])
    return 0


def _divisor(losses: StepLosses) -> Tensor:
    """The trained tokens of a member's step; NaN where its loss is not finite, which skips the update."""
    return torch.where(torch.isfinite(losses.loss_sum), losses.num_trained_tokens.clamp(min=1), torch.nan)


def _save(sweep: Sweep, report: _Report, step: int) -> None:
    with sweep.observer.checkpoint():
        report.flush()
        sweep.save(step)


def _evaluate(
    sweep: Sweep, report: _Report, step: int, members: Sequence[Member], interruption: Interruption | None
) -> None:
    """Score the held-out data of `members`, as in runs of their own. Raises Interrupted for a signal meanwhile."""
    check = None if interruption is None else interruption.check
    held_out = [(member, member.eval_loader) for member in members if member.eval_loader is not None]
    if not held_out:
        return
    with sweep.observer.pause():
        report.flush()
        for member, loader in held_out:
            scores = evaluate(MemberScorer(sweep.engine, member.name), loader, sweep.score_fn, check)
            member.write({"step": step, **scores})


class _Report:
    """Turns the device scalars of each step into each member's lines, on a GPU one step late, as the observer does."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._pending: list[tuple[int, dict[str, float], Tensor]] = []

    def step(
        self, step: int, losses: Mapping[str, StepLosses], updates: Mapping[str, Update], rates: dict[str, float]
    ) -> None:
        """Take in a step that was just launched."""
        sums = torch.stack(
            [torch.stack([own.loss_sum, own.num_trained_tokens, own.num_tokens, own.flops]) for own in losses.values()]
        )
        outcomes = torch.stack([torch.stack([own.grad_norm, own.skipped]).double() for own in updates.values()])
        is_sound = (torch.isfinite(sums[:, 0]) & (outcomes[:, 1] == 0))[:, None]
        joint = torch.where(is_sound, sums, 0).sum(dim=0)
        norm = torch.where(is_sound, outcomes, 0)[:, 0].square().sum().sqrt()
        earlier, self._pending = self._pending, [(step, rates, queue_copy(torch.cat([sums, outcomes], dim=1)))]
        # It waits for the step before, whose numbers are on the host then; on a CPU, for this one.
        self._sweep.observer.step(
            step, StepLosses(*joint.unbind()), Update(norm, torch.zeros_like(norm)), lr=max(rates.values())
        )
        self._write(earlier)
        if self._sweep.engine.device.type == "cpu":
            self.flush()

    def flush(self) -> None:
        """Report what is pending, once the observer has waited for it."""
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
                        "member=%s diverged at step=%d: it takes no more steps; lower its lr or look at its data",
                        name,
                        step,
                    )
        if steps and all(member.diverged for member in members.values()):
            raise DivergedError(steps[-1][0], "no member has a finite loss and gradient; lower train.lr")
