"""A sweep: adapters that train together on one frozen base, each as in a separate run."""

from __future__ import annotations

import filecmp
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from xorl.core.optim import Schedule
from xorl.data import PackedBatch, StepLoader
from xorl.lora import Adam
from xorl.lora.peft import WEIGHTS_FILE
from xorl.train.adapters.files import AdapterFiles
from xorl.train.bank_engine import BankEngine, MixedBatch
from xorl.train.engine import StepLosses, Update
from xorl.train.evaluate import Evaluation
from xorl.train.export.folder import AdapterExport, export_once
from xorl.train.loop import Job
from xorl.train.observe.metrics_file import Metrics, MetricsFile
from xorl.train.observe.observer import DivergedError, MemberStep
from xorl.train.output_dir import MEMBERS

logger = logging.getLogger(__name__)

# The folder of a member's exported adapter, and the folder of all adapters in a checkpoint.
ADAPTER, ADAPTERS = "adapter", "adapters"

MemberBatches = Mapping[str, Sequence[PackedBatch]]


@dataclass
class Member:
    """One member of a sweep, with the parts of a run that it does not share.

    diverged: its loss or gradient was not finite. That step leaves its weights as they were. It takes no more steps
    once the host knows, which on a GPU is a step later.
    """

    name: str
    loader: StepLoader
    schedule: Schedule
    num_steps: int
    weight_decay: float
    metrics: MetricsFile | None
    diverged: bool
    evaluation: Evaluation | None = None
    first: Metrics = field(default_factory=dict)
    last: Metrics = field(default_factory=dict)

    def write(self, metrics: Metrics) -> None:
        """Record the metrics of a step or an evaluation; only the main process has a file."""
        self.first, self.last = {**metrics, **self.first}, {**self.last, **metrics}
        if self.metrics is not None:
            self.metrics.write(metrics)


@dataclass(frozen=True)
class Sweep(Job):
    """A sweep that is ready to train. files: returns the files of each member's adapter."""

    engine: BankEngine
    members: Sequence[Member]
    files: Callable[[], Mapping[str, AdapterFiles]]

    def active(self, step: int) -> list[Member]:
        """The members that still train at `step`, counted from 1; the same on every rank."""
        return [member for member in self.members if step <= member.num_steps and not member.diverged]

    def steps(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """See `Job`. Ends early if all members with steps left have diverged."""
        loaders = {member.name: member.loader for member in self.members if self.start_step < member.num_steps}
        batches = {name: loader.steps(start=self.start_step) for name, loader in loaders.items()}
        for step in range(self.start_step + 1, self.startup.num_steps + 1):
            if not (active := self.active(step)):
                return
            yield step, partial(self._take, step, {member.name: next(batches[member.name])[1] for member in active})

    def _take(self, step: int, batches: MemberBatches) -> None:
        config, engine = self.startup.config, self.engine
        mixed = mix(batches, config.lora.sweep_members_per_pass or len(self.members))
        losses = engine.forward_backward(mixed, self.loss_fn, list(batches))
        self.startup.position.move("update")
        self.checkpoints.saves.before_change()
        taken: dict[str, MemberStep] = {}
        for member in self.members:
            if member.name in batches:
                own, lr = losses[member.name], member.schedule(step)
                adam = Adam(lr=lr, weight_decay=member.weight_decay)
                update = engine.optim_step(member.name, adam, own.divisor, config.train.max_grad_norm)
                taken[member.name] = own, update, lr
        self.observer.step(step, *_joint(taken.values()), lr=max(lr for _, _, lr in taken.values()), members=taken)

    def record(self, name: str, metrics: Metrics, is_finite: bool) -> None:
        """Record a member's step. Raises DivergedError once every member has diverged."""
        [member] = [member for member in self.members if member.name == name]
        member.write(metrics)
        if is_finite or member.diverged:
            return
        member.diverged = True
        step = metrics["step"]
        assert isinstance(step, int)
        logger.warning(
            "member=%s diverged at step=%d: it takes no more steps; lower its lr or check its data", name, step
        )
        if all(member.diverged for member in self.members):
            raise DivergedError(step, "no member has a finite loss and gradient; lower train.lr")

    def evaluations(self, step: int) -> list[Evaluation]:
        """Those of the members that still train at `step`."""
        return [member.evaluation for member in self.active(step) if member.evaluation is not None]

    def save(self, step: int, *, is_final: bool) -> None:
        """See `Job`; also records which members have diverged."""
        diverged = [member.name for member in self.members if member.diverged]
        self.checkpoints.save(step, is_final=is_final, scalars={"diverged": diverged})

    def export(self) -> None:
        """Export the adapters of members that did not diverge, unless they are exported already. Collective."""
        startup, last = self.startup, self.checkpoints.saves.last
        if not startup.config.train.save_hf_weights:
            return
        assert last is not None, "the last step is always saved"
        spec, files = startup.architecture.spec, self.files()
        exports = {
            member_adapter(startup.output_dir, member.name): None
            if member.diverged
            else AdapterExport(files[member.name], spec)
            for member in self.members
        }
        export_once(exports, lambda folder: is_exported(folder, last), aside="former", why=f"is not from {last}")

    def close(self) -> None:
        """See `Job`."""
        super().close()
        for member in self.members:
            if member.metrics is not None:
                member.metrics.close()


def mix(batches: MemberBatches, members_per_pass: int) -> Iterator[MixedBatch]:
    """Join the first micro-batches of all members, then the second ones, with at most `members_per_pass` in each.

    Every rank yields the same number, since each member has the same number of micro-batches on every rank.
    """
    for index in range(max(map(len, batches.values()))):
        parts = [(name, queue[index]) for name, queue in batches.items() if index < len(queue)]
        for start in range(0, len(parts), members_per_pass):
            yield MixedBatch.of(parts[start : start + members_per_pass])


def _joint(steps: Collection[MemberStep]) -> tuple[StepLosses, Update]:
    """The sums over the members whose losses and gradients are finite, and the norm of all their gradients."""
    sums = torch.stack([losses.sums for losses, _, _ in steps])
    outcomes = torch.stack([torch.stack([update.grad_norm, update.skipped]).double() for _, update, _ in steps])
    is_finite = (torch.isfinite(sums[:, 0]) & (outcomes[:, 1] == 0))[:, None]
    norm = torch.where(is_finite, outcomes, 0)[:, 0].square().sum().sqrt()
    return StepLosses.of(torch.where(is_finite, sums, 0).sum(dim=0)), Update(norm, torch.zeros_like(norm))


def member_adapter(output_dir: Path, name: str) -> Path:
    """The folder to which a member's adapter is exported."""
    return output_dir / MEMBERS / name / ADAPTER


def is_exported(folder: Path, checkpoint: Path) -> bool:
    """Whether `folder`, of `member_adapter`, holds the values of this checkpoint."""
    exported, saved = folder / WEIGHTS_FILE, checkpoint / ADAPTERS / folder.parent.name / WEIGHTS_FILE
    return exported.is_file() and saved.is_file() and filecmp.cmp(exported, saved, shallow=False)
