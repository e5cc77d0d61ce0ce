"""The training loop. engine.py implements the parts of a step; build.py builds what the loop uses."""

from __future__ import annotations

from contextlib import nullcontext

from xorl.train.build import Run
from xorl.train.evaluate import Evaluation, evaluate
from xorl.train.interrupt import Interrupted, Interruption
from xorl.train.observe.diverged import NonFiniteSteps


def train(run: Run, *, saves_on_signal: bool = True) -> int:
    """Train from `run.start_step` to the last step. Collective. Returns the signal that ended it early, or 0.

    A signal, or the approach of `train.max_time`, ends the run after the current step, which is saved. During an
    evaluation it also saves the last step and cancels the evaluation, which the resumed run repeats first. Without
    `saves_on_signal`, a signal acts at once.
    After the last step the model is exported, even if an earlier process was stopped before it could do so. Raises
    DivergedError if the loss or the gradient is not finite and such steps stop the run.
    """
    engine, observer, evaluation, saves = run.engine, run.observer, run.evaluation, run.checkpoints.saves
    skips = run.startup.config.train.on_nonfinite == "skip"
    nonfinite = NonFiniteSteps(engine, run.loader, run.loss_fn, run.startup.output_dir, skips=skips)
    observer.on_nonfinite = nonfinite.handle
    at = run.startup.position
    if evaluation is not None and evaluation.at_start:
        _evaluate(run, evaluation, run.start_step, None)
    with (
        Interruption(saves.has_failed, run.startup.deadline(saves))
        if saves_on_signal
        else nullcontext() as interruption,
        saves.flushed(),
        run.garbage_collection,
        run.profiler,
    ):
        observer.start()
        at.move("data", run.start_step + 1)
        for index, batches in observer.fetched(run.loader.steps(start=run.start_step)):
            step = index + 1
            lr = run.schedule(step)
            at.move("forward and backward", step)
            for prepare in run.before_step:
                saves.before_change()
                prepare(step)
            batches = list(batches)
            losses = engine.forward_backward(batches, run.loss_fn, nonfinite.record_step(step, batches))
            at.move("update")
            saves.before_change()
            update = engine.optim_step(lr, divisor=losses.divisor)
            observer.step(step, losses, update, lr=lr)
            signal_number = 0 if interruption is None else interruption.agreed_signal()
            if interruption is not None and interruption.save_failed:
                saves.finish()
            is_saved = bool(signal_number) or run.checkpoints.due(step)
            if is_saved:
                _save(run, step, is_final=bool(signal_number) or step == run.startup.num_steps)
            if signal_number and step < run.startup.num_steps:
                return signal_number
            if evaluation is not None and evaluation.due(step):
                try:
                    _evaluate(run, evaluation, step, interruption)
                except Interrupted as interrupted:
                    if not is_saved:
                        _save(run, step, is_final=True)
                    return interrupted.signal_number
            run.garbage_collection.step(step)
            run.profiler.step(step)
            at.move("data", step + 1)
        observer.flush()
        at.move("export")
        run.checkpoints.export()
    return 0


def _save(run: Run, step: int, *, is_final: bool) -> None:
    run.startup.position.move("save")
    with run.observer.checkpoint():
        run.checkpoints.save(step, is_final=is_final)


def _evaluate(run: Run, evaluation: Evaluation, step: int, interruption: Interruption | None) -> None:
    """Score the held-out data. Raises Interrupted if a signal arrives meanwhile."""
    position = run.startup.position

    def check() -> None:
        position.move("evaluation")
        if interruption is not None:
            interruption.check()

    with run.observer.pause():
        scores = evaluate(run.engine, evaluation.loader, check)
        run.observer.write({"step": step, **scores})
