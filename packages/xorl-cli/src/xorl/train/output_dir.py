"""The output folder of a run or a sweep: its lock, the files in it, and the checkpoint to resume from."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from xorl.ckpt import Checkpointer, CheckpointError
from xorl.ckpt.layout import LATEST, is_complete, prepare_root, step_of
from xorl.config.local import TrainConfig
from xorl.core.runtime import global_rank
from xorl.host.lock import lock_within

logger = logging.getLogger(__name__)

OPTION = "train.output_dir"
# The receipt says what happened to every sample; the metrics have a line for each step and evaluation. Each member of
# a sweep has both in MEMBERS/NAME.
RECEIPT, METRICS, MEMBERS = "data_receipt.json", "metrics.jsonl", "sweep"
LOCK_FILE = ".lock"
# Long enough for the ranks of a killed launcher to notice, save and end, and for the loaders of a killed rank to end.
LOCK_TIMEOUT_S = 30.0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder`: two runs in it would delete each other's checkpoints and truncate each other's metrics.

    Raises ValueError if another run holds the lock. On a file system without locks it only logs a warning.
    """
    prepare_root(folder, OPTION)
    path = folder / LOCK_FILE
    try:
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise ValueError(f"{OPTION}: {path} cannot be written ({error.strerror})") from error
    with file:
        _lock(file, folder)
        with suppress(OSError):  # on a full disk, messages of other runs cannot name this one
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}".encode())
        try:
            yield
        finally:
            with suppress(OSError):  # the file system may not support locks
                fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: forked processes have the file open as well


def _lock(file: IO[bytes], folder: Path) -> None:
    def describe_holder() -> str:
        file.seek(0)
        holder = file.read().decode() or "one that is just starting"
        return f"{OPTION}: another run writes to {folder} ({holder})"

    try:
        lock_within(LOCK_TIMEOUT_S, file, describe_holder, advice="wait for it, stop it, or choose another folder")
    except OSError as error:
        logger.warning("%s: %s cannot be locked (%s); start one run at a time there", OPTION, folder, error)


def open_output_dir(train: TrainConfig) -> tuple[Checkpointer, Path | None]:
    """Create the folders a run writes to; returns its checkpoints and the checkpoint to resume from, or None.

    Raises ValueError if a folder cannot be written or the checkpoint cannot be used.
    """
    prepare_root(output_dir := Path(train.output_dir), OPTION)
    if train.enable_profiling and (global_rank() == 0 or not train.profile_rank0_only):
        prepare_root(Path(train.profile_trace_dir), "train.profile_trace_dir")
    checkpointer = Checkpointer(output_dir / "checkpoints", manager=train.ckpt_manager, root_option=OPTION)
    return checkpointer, resume_from(checkpointer, train.load_checkpoint_path)


def resume_from(checkpointer: Checkpointer, option: str | None) -> Path | None:
    """The checkpoint selected by `train.load_checkpoint_path`; None starts from scratch.

    Raises CheckpointError if the run would later reach the step of an existing checkpoint, which is never overwritten.
    """
    if (named := checkpointer.root / LATEST).is_dir():
        raise CheckpointError(
            f"{OPTION}: {named} is a folder, but runs write the name of their newest checkpoint to a file of that "
            "name; rename it"
        )
    latest = checkpointer.latest()
    if option == "auto":
        _require_none_ahead(checkpointer.root, latest)
        return latest
    try:
        resumed = checkpointer.resolve(option) if option else None
    except CheckpointError as error:
        raise CheckpointError(f"train.load_checkpoint_path: {error}") from error
    if latest is not None and latest != resumed:
        raise CheckpointError(
            f"{OPTION}: {checkpointer.root} already holds checkpoints, the latest {latest.name}. Continue from "
            "it with --train.load_checkpoint_path auto, move it away, or choose another --train.output_dir"
        )
    _require_none_ahead(checkpointer.root, resumed)
    return resumed


def _require_none_ahead(root: Path, resumed: Path | None) -> None:
    """Raise CheckpointError now for folders that the run would only collide with hours later."""
    start_step = 0 if resumed is None else step_of(resumed) or 0
    for folder in root.glob("global_step_*"):
        if (step_of(folder) or 0) > start_step:
            reason = f"is newer than what {root / LATEST} names" if is_complete(folder) else "is not complete"
            raise CheckpointError(
                f"{OPTION}: {folder} {reason}, and this run would reach its step but cannot overwrite a checkpoint: "
                "move it away"
            )
