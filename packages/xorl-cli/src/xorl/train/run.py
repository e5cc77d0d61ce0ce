"""run_training: one rank of `xorl train`, from a checked configuration to an exit code."""

from __future__ import annotations

import logging
import signal
from contextlib import nullcontext
from pathlib import Path

from xorl.config import Config, LoadedConfig, TrainConfig
from xorl.core import runtime
from xorl.train.adapters.folder import is_adapter
from xorl.train.build import METRICS, Run, RunComplete, build_run
from xorl.train.loop import train
from xorl.train.observe.observer import Observer
from xorl.train.observe.progress import set_up_logging
from xorl.train.output_dir import held
from xorl.train.sweep.build import build_sweep
from xorl.train.sweep.loop import train_sweep
from xorl.train.sweep.saving import MEMBERS

logger = logging.getLogger(__name__)


def run_training(loaded: LoadedConfig) -> int:
    """Train as `loaded` says in this rank. Returns 0, or 128 + the signal that stopped the run after a checkpoint.

    Errors are raised, not turned into codes: ValueError for bad input, DivergedError for a loss that is not finite.
    """
    config = loaded.config
    is_main = runtime.global_rank() == 0
    set_up_logging(config.train.log_format, is_main=is_main)
    try:
        with held(Path(config.train.output_dir)) if is_main else nullcontext():
            signal_number = _run_sweep(config) if config.lora.sweep else _run(config)
            runtime.shutdown()
    except RunComplete as complete:
        logger.info("complete=%s: %s", complete.path, _way_on(config.train, complete.path))
        runtime.shutdown()
        return 0
    return 128 + signal_number if signal_number else 0


def _way_on(train: TrainConfig, complete: Path) -> str:
    """What to do where the checkpoint to go on from has taken all steps."""
    if complete.parent == Path(train.output_dir).absolute() / "checkpoints":
        return "this run has taken all its steps. Train anew in another folder with --train.output_dir"
    return (
        "train.load_checkpoint_path names a run that has taken all the steps that this one asks for, so nothing was "
        f"trained in {train.output_dir}. Go on from it with more steps (train.max_steps or train.num_train_epochs), or "
        "train anew there without --train.load_checkpoint_path"
    )


def _run(config: Config) -> int:
    run = build_run(config)
    try:
        signal_number = train(run)
    finally:
        run.observer.close()
    _summarise(run, signal_number)
    return signal_number


def _run_sweep(config: Config) -> int:
    sweep = build_sweep(config)
    try:
        signal_number = train_sweep(sweep)
    finally:
        sweep.close()
    for member in sweep.members:
        first, last = member.first.get("loss"), member.last.get("loss")
        change = f"{first:.4g} -> {last:.4g}" if first is not None and last is not None else "unknown"
        folder = sweep.output_dir / MEMBERS / member.name
        logger.info("%-11s loss %s%s, in %s", member.name, change, ", diverged" * member.diverged, folder)
    logger.info("checkpoint  %s", sweep.saving.last)
    if signal_number:
        name = signal.Signals(signal_number).name
        logger.info("next        stopped by %s: continue with --train.load_checkpoint_path auto", name)
    return signal_number


def _summarise(run: Run, signal_number: int) -> None:
    """What was reached, where the results are and what to do next."""
    observer, exported = run.observer, run.checkpoints.exported
    trained = f"{observer.num_tokens:,} tokens in {observer.elapsed_s:.1f} s"
    lines = [f"trained     {trained}, loss {_change(observer, 'loss')}"]
    if run.eval_loader is not None:
        lines.append(
            f"held out    loss {_change(observer, 'eval_loss')}, "
            f"tokens right {_change(observer, 'eval_token_accuracy')}, "
            f"whole answers right {_change(observer, 'eval_accuracy')}"
        )
    lines.append(f"checkpoint  {run.checkpoints.last}")
    lines.append(f"metrics     {run.output_dir / METRICS}")
    if exported is not None and is_adapter(exported):
        lines.append(f"adapter     {exported}, for PEFT's PeftModel.from_pretrained")
    elif exported is not None:
        lines.append(f"model       {exported}, for transformers' AutoModelForCausalLM.from_pretrained")
    if signal_number:
        name = signal.Signals(signal_number).name
        lines.append(f"next        stopped by {name}: continue with --train.load_checkpoint_path auto")
    elif exported is not None:
        option = "lora.adapter_path" if is_adapter(exported) else "model.model_path"
        lines.append(f"next        train on from it: --{option} {exported} --train.output_dir OTHER_FOLDER")
    for line in lines:
        logger.info(line)


def _change(observer: Observer, key: str) -> str:
    first, last = observer.first.get(key), observer.last.get(key)
    return f"{first:.4g} -> {last:.4g}" if first is not None and last is not None else "unknown"
