"""run_training runs one rank of `xorl train`: it takes a checked configuration and returns an exit code."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from xorl.config import Config, LoadedConfig
from xorl.config.local import TrainConfig
from xorl.core.runtime import global_rank, shutdown
from xorl.train.adapters.folder import is_adapter
from xorl.train.build import build_run
from xorl.train.interrupt import OUT_OF_TIME
from xorl.train.loop import Run, train
from xorl.train.observe.observer import Observer
from xorl.train.observe.progress import set_up_logging
from xorl.train.output_dir import METRICS, locked
from xorl.train.startup import RunComplete
from xorl.train.sweep.build import build_sweep
from xorl.train.sweep.sweep import Member, Sweep
from xorl.train.watchdog import Watchdog

logger = logging.getLogger(__name__)


def run_training(loaded: LoadedConfig, end: Callable[[Exception], object] | None = None) -> int:
    """Run this rank's part of the training. Returns 0, or 128 + the signal that stopped the run after a checkpoint.

    A thread calls `end`, which must end the process, if the job hangs or another rank is lost; None does not watch.

    Raises ValueError for bad input, and DivergedError if the loss or the gradient is not finite.
    """
    config = loaded.config
    is_main = global_rank() == 0
    set_up_logging(config.train.log_format, config.train.log_level, is_main=is_main)
    if is_main and (line := loaded.without_effect_line()) is not None:
        logger.warning("%s", line)
    watchdog = None if end is None else Watchdog(end)
    try:
        with (
            locked(Path(config.train.output_dir)) if is_main else nullcontext(),
            nullcontext() if watchdog is None else watchdog.explaining(),
        ):
            signal_number = _run(config, watchdog)
            shutdown()
    except RunComplete as complete:
        logger.info("complete=%s: %s", complete.path, _complete_message(config.train, complete.path))
        shutdown()
        return 0
    return 128 + signal_number if signal_number else 0


def _complete_message(train: TrainConfig, complete: Path) -> str:
    if complete.parent == Path(train.output_dir).absolute() / "checkpoints":
        return "this run has taken all its steps. Start a new run in another folder with --train.output_dir"
    return (
        "train.load_checkpoint_path names a run that has already taken all configured steps, so nothing was trained in "
        f"{train.output_dir}. Continue it with more steps (train.max_steps or train.num_train_epochs), or start a new "
        "run without --train.load_checkpoint_path"
    )


def _run(config: Config, watchdog: Watchdog | None) -> int:
    job = build_sweep(config, watchdog=watchdog) if config.lora.sweep else build_run(config, watchdog=watchdog)
    try:
        job.checkpoints.prepare(job.start_step)
        signal_number = train(job)
    finally:
        job.close()
    lines = _of_members(job) if isinstance(job, Sweep) else _of_run(job)
    lines.append(f"checkpoint  {job.checkpoints.saves.last}")
    if isinstance(job, Run):
        lines += _files(job, is_exported=job.final_export is not None and not signal_number)
    if signal_number:
        lines.append(_stopped(signal_number))
    for line in lines:
        logger.info(line)
    return signal_number


def _of_members(sweep: Sweep) -> list[str]:
    """The results of each member, and where they are."""
    folders = {name: run.folder for name, run in sweep.startup.runs.items()}
    return [
        f"{member.name:11} loss {_change(member, 'loss')}{', diverged' * member.diverged}, in {folders[member.name]}"
        for member in sweep.members
    ]


def _of_run(run: Run) -> list[str]:
    """The results of a run."""
    observer = run.observer
    trained = f"{observer.num_tokens:,} tokens in {observer.elapsed_s:.1f} s"
    lines = [f"trained     {trained}, loss {_change(observer, 'loss')}"]
    if run.evaluation is not None and run.preference is not None:
        lines.append(
            f"held out    loss {_change(observer, 'eval_loss')}, preferred right "
            f"{_change(observer, 'eval_reward_accuracy')}, margin {_change(observer, 'eval_reward_margin')}"
        )
    elif run.evaluation is not None:
        lines.append(
            f"held out    loss {_change(observer, 'eval_loss')}, "
            f"tokens right {_change(observer, 'eval_token_accuracy')}, "
            f"whole answers right {_change(observer, 'eval_accuracy')}"
        )
    return lines


def _files(run: Run, *, is_exported: bool) -> list[str]:
    """Where the results of a run are, and what to do next with its export."""
    lines = [f"metrics     {run.startup.output_dir / METRICS}"]
    if is_exported:
        assert run.final_export is not None
        folder = run.exported_to
        kind, option = ("adapter", "lora.adapter_path") if is_adapter(folder) else ("model", "model.model_path")
        lines.append(f"{kind:11} {folder}, for {run.final_export.readers}")
        lines.append(f"next        train on from it: --{option} {folder} --train.output_dir OTHER_FOLDER")
    return lines


def _stopped(signal_number: int) -> str:
    cause = "train.max_time" if signal_number == OUT_OF_TIME else signal.Signals(signal_number).name
    return f"next        stopped by {cause}: continue with --train.load_checkpoint_path auto"


def _change(source: Observer | Member, key: str) -> str:
    first, last = source.first.get(key), source.last.get(key)
    if first is None or last is None:
        return "unknown"
    # A single evaluation, such as that at the end of a resumed run, is not a change.
    return f"{last:.4g}" if first == last else f"{first:.4g} -> {last:.4g}"
