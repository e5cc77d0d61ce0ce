"""The training loop. What a step does is in engine.py; what the loop is given is built by build.py."""

from __future__ import annotations

from contextlib import nullcontext

from xorl.core.runtime import GarbageCollection
from xorl.train.build import Run
from xorl.train.evaluate import evaluate
from xorl.train.interrupt import Interrupted, Interruption
from xorl.train.observe.diverged import LossesOfBins


def train(run: Run, *, saves_on_signal: bool = True) -> int:
    """Train from `run.start_step` to the last step. Collective. Returns the signal that ended it early, or 0.

    A signal ends the run after the current step, which is saved; without `saves_on_signal`, a signal acts at once. An
    evaluation is not waited for: a step is saved before, and the run that goes on from it begins with what is missing.
    After the last step the model is exported, also if an earlier process was stopped before it could do so. Raises
    DivergedError if the loss or the gradient is not finite.
    """
    engine, observer, losses_of_bins = run.engine, run.observer, LossesOfBins(run.loader)
    if run.evaluates_first:
        _evaluate(run, run.start_step, None)
    with (
        Interruption() if saves_on_signal else nullcontext() as interruption,
        GarbageCollection(run.gc_steps, run.empty_cache_steps) as garbage,
        run.profiler,
        losses_of_bins.named(),
    ):
        observer.start()
        for index, batches in observer.fetched(run.loader.steps(start=run.start_step)):
            step = index + 1
            lr = run.schedule(step)
            for prepare in run.before_step:
                prepare(step)
            losses = engine.forward_backward(batches, run.loss_fn, losses_of_bins.of_step(step))
            update = engine.optim_step(lr, divisor=losses.num_trained_tokens.clamp(min=1))
            observer.step(step, losses, update, lr=lr)
            signal_number = 0 if interruption is None else interruption.agreed()
            is_saved = bool(signal_number) or run.checkpoints.due(step)
            if is_saved:
                _save(run, step)
            if signal_number and step < run.num_steps:
                return signal_number
            if run.evaluates_after(step):
                try:
                    _evaluate(run, step, interruption)
                except Interrupted as interrupted:
                    if not is_saved:
                        _save(run, step)
                    return interrupted.signal_number
            garbage.step(step)
            run.profiler.step(step)
        observer.flush()
        run.checkpoints.export()
    return 0


def _save(run: Run, step: int) -> None:
    with run.observer.checkpoint():
        run.checkpoints.save(step)


def _evaluate(run: Run, step: int, interruption: Interruption | None) -> None:
    """Raises Interrupted for a signal that comes meanwhile."""
    if run.eval_loader is not None:
        check = None if interruption is None else interruption.check
        with run.observer.pause():
            run.observer.write({"step": step, **evaluate(run.engine, run.eval_loader, run.score_fn, check)})
