"""The folder that a run writes to: its lock, and the checkpoint in it from which the run continues."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from xorl.ckpt import Checkpointer, CheckpointError, is_complete
from xorl.ckpt.layout import LATEST, prepare_root, step_of
from xorl.config import TrainConfig
from xorl.core import runtime
from xorl.host.lock import lock_within

logger = logging.getLogger(__name__)

OPTION = "train.output_dir"
LOCK_FILE = ".lock"
# For the ranks of a run whose launcher was killed, which notice, save and end, and for the loaders of a killed rank.
LEFT_S = 30.0


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`: two runs in it would delete each other's checkpoints and cut each other's metrics.

    Raises ValueError if another run holds it. A file system without locks only gets a warning.
    """
    prepare_root(folder, OPTION)
    path = folder / LOCK_FILE
    try:
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise ValueError(f"{OPTION}: {path} cannot be written ({error.strerror})") from error
    with file:
        _lock(file, folder)
        with suppress(OSError):  # on a full disk, the next one is not told who this is
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}".encode())
        try:
            yield
        finally:
            with suppress(OSError):  # where there are no locks
                fcntl.flock(file, fcntl.LOCK_UN)  # processes that were forked meanwhile have the file open, too


def _lock(file: IO[bytes], folder: Path) -> None:
    def taken() -> str:
        file.seek(0)
        holder = file.read().decode() or "one that is just starting"
        return f"{OPTION}: another run writes to {folder} ({holder})"

    try:
        lock_within(LEFT_S, file, taken, advice="wait for it, stop it, or choose another folder")
    except OSError as error:
        logger.warning("%s: %s cannot be locked (%s); start one run at a time there", OPTION, folder, error)


def begin(train: TrainConfig) -> tuple[Path, Checkpointer, Path | None]:
    """The start of a run, before any data: (output_dir, its checkpoints, the checkpoint to resume from or None).

    Raises ValueError for what the user can correct.
    """
    if train.enable_full_determinism:
        runtime.enable_determinism()
    elif not train.allow_cuda_launch_blocking:
        runtime.refuse_launch_blocking()
    prepare_root(output_dir := Path(train.output_dir), OPTION)
    if train.enable_profiling and (runtime.global_rank() == 0 or not train.profile_rank0_only):
        prepare_root(Path(train.profile_trace_dir), "train.profile_trace_dir")
    checkpointer = Checkpointer(output_dir / "checkpoints", manager=train.ckpt_manager, root_option=OPTION)
    return output_dir, checkpointer, resume_from(checkpointer, train.load_checkpoint_path)


def resume_from(checkpointer: Checkpointer, option: str | None) -> Path | None:
    """The checkpoint that `train.load_checkpoint_path` asks for; None starts from scratch.

    Raises CheckpointError if the run would later reach the steps of checkpoints that it did not write: a checkpoint is
    never overwritten.
    """
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
    """Raises CheckpointError now for a folder that the run would only collide with at its step, hours later."""
    begun = 0 if resumed is None else step_of(resumed) or 0
    for folder in root.glob("global_step_*"):
        if (step_of(folder) or 0) > begun:
            reason = f"is newer than what {root / LATEST} names" if is_complete(folder) else "is not complete"
            raise CheckpointError(
                f"{OPTION}: {folder} {reason}, and this run would come to its step and never overwrites a checkpoint: "
                "move it away"
            )
