"""The training loop, and the steps of a run. engine.py has the parts of a step; build.py builds what the loop uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from xorl.core.loss import LossFn, LossOutput
from xorl.core.optim import Schedule
from xorl.core.runtime import GarbageCollection
from xorl.data import PackedBatch
from xorl.train.checkpoints import Checkpoints
from xorl.train.data import Loader
from xorl.train.engine import Engine
from xorl.train.evaluate import Evaluation
from xorl.train.export.folder import AdapterExport, ModelExport, export_folder, export_once, is_complete_export
from xorl.train.interrupt import Interrupted, Interruption
from xorl.train.observe.diverged import NonFiniteSteps
from xorl.train.observe.observer import Observer
from xorl.train.observe.profile import Profiler
from xorl.train.preference import Preference
from xorl.train.startup import Startup


@dataclass(frozen=True)
class Job(ABC):
    """A run or a sweep that is ready to train: see `train`. start_step: the number of steps already taken."""

    startup: Startup
    loss_fn: LossFn
    observer: Observer
    checkpoints: Checkpoints
    profiler: Profiler
    garbage_collection: GarbageCollection
    start_step: int

    @abstractmethod
    def steps(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """Read the data of each step from `start_step` on; yields its number, from 1, and a function that takes it.

        Each is collective. The function also reports the step to the observer.
        """

    @abstractmethod
    def evaluations(self, step: int) -> Sequence[Evaluation]:
        """The evaluations of what trains in `step`, due or not; the same on every rank."""

    def save(self, step: int, *, is_final: bool) -> None:
        """See `Checkpoints.save`."""
        self.checkpoints.save(step, is_final=is_final)

    @abstractmethod
    def export(self) -> None:
        """Export what was trained, as of the last checkpoint, if the job exports at all. Collective."""

    def close(self) -> None:
        """Close the files of metrics."""
        self.observer.close()


@dataclass(frozen=True)
class Run(Job):
    """A run that is ready to train: see `train`.

    evaluation: None without held-out data. before_step: functions to call before each step with its number, counted
    from 1; each is collective. preference: of a run on pairs of answers. final_export: None exports nothing.
    """

    engine: Engine
    loader: Loader
    evaluation: Evaluation | None
    schedule: Schedule
    before_step: tuple[Callable[[int], None], ...]
    nonfinite: NonFiniteSteps
    preference: Preference | None
    final_export: ModelExport | AdapterExport | None

    def steps(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """See `Job`."""
        for index, batches in self.loader.steps(start=self.start_step):
            yield index + 1, partial(self._take, index + 1, batches)

    def _take(self, step: int, batches: Sequence[PackedBatch]) -> None:
        saves, lr = self.checkpoints.saves, self.schedule(step)
        for prepare in self.before_step:
            saves.before_change()
            prepare(step)
        preference = self.preference
        if preference is not None:
            batches = preference.prepare(batches)
        metrics_by_batch: list[Mapping[str, Tensor]] = []
        record = self.nonfinite.record_step(step, batches)

        def on_output(index: int, output: LossOutput) -> None:
            record(index, output)
            metrics_by_batch.append(output.metrics)

        losses = self.engine.forward_backward(batches, self.loss_fn, on_output)
        self.startup.position.move("update")
        saves.before_change()
        update = self.engine.optim_step(lr, divisor=losses.divisor)
        self.engine.correct_routers(losses, update)
        metrics = {} if preference is None else preference.step_metrics(metrics_by_batch)
        self.observer.step(step, losses, update, lr=lr, metrics=metrics)

    def evaluations(self, step: int) -> list[Evaluation]:
        """See `Job`."""
        del step
        return [] if self.evaluation is None else [self.evaluation]

    def export(self) -> None:
        """See `Job`."""
        if self.final_export is not None:
            exports = {self.exported_to: self.final_export}
            export_once(exports, is_complete_export, aside="damaged", why="lacks weight files")

    @property
    def exported_to(self) -> Path:
        """The folder of the model or adapter that the run exports at its end."""
        last = self.checkpoints.saves.last
        assert last is not None, "the last step is always saved"
        return export_folder(last)


def train(job: Job, *, saves_on_signal: bool = True) -> int:
    """Train from `job.start_step` to the last step. Collective. Returns the signal that ended it early, or 0.

    A signal, or the approach of `train.max_time`, ends the job after the current step, which is saved. During an
    evaluation it also saves the last step and cancels the evaluation, which the resumed job repeats first. Without
    `saves_on_signal`, a signal acts at once.
    After the last step the model is exported, even if an earlier process was stopped before it could do so. Raises
    DivergedError if the loss or the gradient is not finite and such steps stop the run, or those of all members of a
    sweep.
    """
    observer, saves, at, num_steps = job.observer, job.checkpoints.saves, job.startup.position, job.startup.num_steps
    step = job.start_step
    _evaluate(job, step, [each for each in job.evaluations(max(step, 1)) if each.at_start], None)
    with (
        Interruption(saves.has_failed, job.startup.deadline(saves))
        if saves_on_signal
        else nullcontext() as interruption,
        saves.flushed(),
        job.garbage_collection,
        job.profiler,
    ):
        observer.start()
        at.move("data", step + 1)
        for step, take_step in observer.fetched(job.steps()):
            at.move("forward and backward", step)
            take_step()
            signal_number = 0 if interruption is None else interruption.agreed_signal()
            if interruption is not None and interruption.save_failed:
                saves.finish()
            is_saved = bool(signal_number) or job.checkpoints.due(step)
            if is_saved:
                _save(job, step, is_final=bool(signal_number) or step == num_steps)
            if signal_number and step < num_steps:
                return signal_number
            try:
                _evaluate(job, step, [each for each in job.evaluations(step) if each.due(step)], interruption)
            except Interrupted as interrupted:
                if not is_saved:
                    _save(job, step, is_final=True)
                return interrupted.signal_number
            job.garbage_collection.step(step)
            job.profiler.step(step)
            at.move("data", step + 1)
        if step < num_steps:
            # The members of a sweep that have steps left have all diverged.
            _save(job, step, is_final=True)
        observer.flush()
        at.move("export")
        job.export()
    return 0


def _save(job: Job, step: int, *, is_final: bool) -> None:
    job.startup.position.move("save")
    with job.observer.checkpoint():
        job.save(step, is_final=is_final)


def _evaluate(job: Job, step: int, evaluations: Sequence[Evaluation], interruption: Interruption | None) -> None:
    """Score held-out data. Raises Interrupted if a signal arrives meanwhile."""
    if not evaluations:
        return
    position = job.startup.position

    def check() -> None:
        position.move("evaluation")
        if interruption is not None:
            interruption.check()

    with job.observer.pause():
        for each in evaluations:
            each.write({"step": step, **each.score(check)})
