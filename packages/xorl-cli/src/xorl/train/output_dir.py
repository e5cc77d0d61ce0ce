"""The output folder of a run or a sweep: its lock, the files in it, and the checkpoint to resume from."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

from xorl.ckpt import Checkpointer, CheckpointError, Retention
from xorl.ckpt.layout import LATEST, MANIFEST, is_complete, read_manifest, step_of
from xorl.ckpt.publish import prepare_root
from xorl.config.local import TrainConfig
from xorl.core.runtime import global_rank
from xorl.host.lock import lock_within
from xorl.train.observe.metrics_file import evaluation_losses

logger = logging.getLogger(__name__)

OPTION = "train.output_dir"
# The receipt says what happened to every sample; the metrics have a line for each step and evaluation. Each member of
# a sweep has both in MEMBERS/NAME.
RECEIPT, METRICS, MEMBERS = "data_receipt.json", "metrics.jsonl", "sweep"
# In a checkpoint's manifest: the path of the checkpoint that its run was told to start from, or null.
STARTED_FROM = "started_from"
LOCK_FILE = ".lock"
# Far longer than the processes of a killed launcher or rank take to end.
LOCK_TIMEOUT_S = 10.0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder`: two runs in it would delete each other's checkpoints and truncate each other's metrics.

    Raises FolderInUseError if another run holds the lock. On a file system without locks it only logs a warning.
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


def write_json(path: Path, content: object) -> None:
    """Replace a file in the folder. Raises ValueError if it cannot be written."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ValueError(
            f"{OPTION}: {path} cannot be written ({error.strerror}); make room, or choose another folder"
        ) from error


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
    retention = None
    if train.keep_last is not None:
        losses = partial(evaluation_losses, output_dir / METRICS)
        retention = Retention(train.keep_last, train.keep_every, train.keep_best, losses)
    checkpointer = Checkpointer(
        output_dir / "checkpoints", manager=train.ckpt_manager, retention=retention, root_option=OPTION
    )
    return checkpointer, resume_from(checkpointer, train.load_checkpoint_path)


def resume_from(checkpointer: Checkpointer, option: str | None) -> Path | None:
    """The checkpoint selected by `train.load_checkpoint_path`; None starts from scratch.

    If the option names a checkpoint from which this run has already started, the run continues from its newest one, so
    the same command can be repeated. Raises CheckpointError if the checkpoint does not exist, or if a run would ignore
    the checkpoints in its folder.
    """
    root = checkpointer.root
    if (named := root / LATEST).is_dir():
        raise CheckpointError(
            f"{OPTION}: {named} is a folder, but must be a file that names the newest checkpoint; rename it"
        )
    latest = checkpointer.latest()
    if option == "auto":
        _require_complete(root, latest)
        return latest
    if option and latest is not None and not _names(root, option, latest):
        start = started_from(latest)
        if start is not None and _names(root, option, Path(start)):
            logger.info("train.load_checkpoint_path: this run started from %s and continues from %s", option, latest)
            return latest
    try:
        resumed = checkpointer.resolve(option) if option else None
    except CheckpointError as error:
        raise CheckpointError(f"train.load_checkpoint_path: {error}") from error
    if latest is not None and (resumed is None or resumed.parent != root):
        raise CheckpointError(
            f"{OPTION}: {root} already holds checkpoints, the latest {latest.name}. Continue from "
            "it with --train.load_checkpoint_path auto, move it away, or choose another --train.output_dir"
        )
    if resumed is None:
        _require_complete(root, None)
    return resumed


def start_of(root: Path, option: str | None, resumed: Path | None) -> str | None:
    """The STARTED_FROM of a run that resumes from `resumed`: that checkpoint if it was named, else what it records."""
    if resumed is None or not option:
        return None
    return str(resumed) if option != "auto" and _names(root, option, resumed) else started_from(resumed)


def started_from(checkpoint: Path) -> str | None:
    """The checkpoint from which the run of this one started, if it was named; see `resume_from`."""
    try:
        start = read_manifest(checkpoint).info.get(STARTED_FROM)
    except CheckpointError:  # reported if it is loaded
        return None
    return start if isinstance(start, str) else None


def _names(root: Path, option: str, checkpoint: Path) -> bool:
    """Whether the option names this checkpoint, by a path or by its name under the root."""
    given = Path(option).expanduser()
    return str(checkpoint) in (os.path.abspath(given), os.path.abspath(root / given))


def _require_complete(root: Path, resumed: Path | None) -> None:
    """Raise CheckpointError if a newer checkpoint is damaged, since the run would silently start before it."""
    step = -1 if resumed is None else step_of(resumed) or 0
    for folder in root.glob("global_step_*"):
        if (step_of(folder) or 0) > step and step_of(folder) is not None and not is_complete(folder):
            other = "" if resumed is None else f", go back with --train.load_checkpoint_path {resumed.name}"
            raise CheckpointError(
                f"{OPTION}: {folder} is not complete: it has no {MANIFEST}. Copy it again from its source{other}, or "
                "move it away"
            )
