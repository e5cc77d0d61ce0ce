"""Changes a root of checkpoints: creates, publishes, prunes and sets aside. Only rank 0 calls these functions.

A process that dies leaves temporary folders behind; the next save removes them, unless their owner is alive.
"""

import errno
import fcntl
import logging
import math
import os
import platform
import secrets
import shutil
import tempfile
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from xorl.ckpt.errors import CheckpointError, CheckpointFailure
from xorl.ckpt.files import size_problems, sync_file, write_file, writing_to
from xorl.ckpt.layout import (
    DELETING,
    LATEST,
    MANIFEST,
    SAVING,
    SET_ASIDE,
    TRAINING_STATE,
    Manifest,
    checkpoint_name,
    latest_checkpoint,
    list_checkpoints,
    named_by_latest,
    step_of,
)

logger = logging.getLogger(__name__)

_OWNER, _POINTER = ".owner", ".latest"  # files beside a folder of a save
# The folders that this process writes, with their locked files.
_OWNED: dict[Path, IO[str]] = {}


def prepare_root(root: Path, option: str) -> None:
    """Create the root and check that it is writable; `option` is the option that sets it, for error messages."""
    with writing_to(root, option):
        if not root.is_dir():
            root.mkdir(parents=True, exist_ok=True)
            sync_file(root.parent)
        # The name is unique because several hosts may run this at once.
        probe = Path(tempfile.mkdtemp(prefix=f"{SAVING}probe_", dir=root))
        with suppress(FileNotFoundError):  # another process took it for a leftover
            probe.rmdir()


def require_space(root: Path, num_bytes: int) -> float:
    """The free bytes on the disk of `root`. Raises CheckpointFailure unless a checkpoint of this size fits."""
    usage = shutil.disk_usage(root)
    if usage.total and usage.free < num_bytes:  # some network file systems report no sizes
        raise CheckpointFailure(
            f"{os.strerror(errno.ENOSPC)} for a checkpoint: it needs {size_text(num_bytes)}, but the disk of {root} "
            f"has only {size_text(usage.free)} free; free space there"
        )
    return usage.free if usage.total else math.inf


def size_text(num_bytes: float) -> str:
    """A number of bytes in GiB, or in MiB if it is small, for messages."""
    unit, name = (2**30, "GiB") if num_bytes >= 2**28 else (2**20, "MiB")
    return f"{num_bytes / unit:.2f} {name}"


def create_folder(root: Path, name: str) -> Path:
    """Create the temporary folder of the checkpoint `name`, owned by this process until it is published or discarded.

    Other processes do not remove it while this one lives.
    """
    folder = root / f"{SAVING}{name}_{secrets.token_hex(4)}"
    owner = _owner_of(folder)
    file = owner.open("x")
    with suppress(OSError):  # without locks, any later save may remove what this one leaves
        # Locks of this kind are not inherited by forked processes, such as a loader's workers.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _OWNED[folder] = file
    try:
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        (folder / TRAINING_STATE).mkdir(parents=True)
    except OSError:
        discard(folder)
        raise
    return folder


def discard(folder: Path) -> None:
    """Remove a folder from `create_folder` after an error; what cannot be removed is left to the next save."""
    shutil.rmtree(folder, ignore_errors=True)
    _release(folder)


def publish(folder: Path, root: Path, manifest: Manifest) -> Path:
    """Turn a folder from `create_folder` into the checkpoint of a step, and point `latest` to it.

    Its files must be written and durable. For checkpoints with other names see `publish_named`.
    """
    previous, _ = named_by_latest(root)
    _complete(folder, replace(manifest, previous=previous.name if previous else None))
    final = root / checkpoint_name(manifest.step)
    if final.exists():
        raise CheckpointError(f"{final} appeared while this checkpoint was written; does another job save there?")
    # All writes that can fail on a full disk happen before the rename that publishes the checkpoint.
    pointer = folder.with_name(f"{folder.name}{_POINTER}")
    write_file(pointer, f"{final.name}\n".encode())
    folder.rename(final)
    sync_file(root)
    pointer.replace(root / LATEST)
    sync_file(root)
    _release(folder)
    return final


def publish_named(folder: Path, final: Path, manifest: Manifest, *, replaces: bool) -> None:
    """Turn a folder from `create_folder` into the checkpoint `final`; `latest` does not change.

    With `replaces` it replaces an existing checkpoint, which stays complete until then.
    """
    _complete(folder, manifest)
    replaced: Path | None = None
    if final.exists():
        if not replaces:
            raise CheckpointError(f"{final} appeared while this checkpoint was written; does another job save there?")
        replaced = _rename_to_delete(final)
    folder.rename(final)
    sync_file(final.parent)
    _release(folder)
    if replaced is not None:
        shutil.rmtree(replaced)


def prune(root: Path, keep: Collection[int]) -> list[Path]:
    """Remove the checkpoints whose step is not in `keep`, except the latest; returns the removed folders."""
    latest = latest_checkpoint(root)
    old = [folder for folder in list_checkpoints(root) if step_of(folder) not in keep and folder != latest]
    for folder in old:
        remove(folder)
    return old


def remove(folder: Path) -> None:
    """Delete a checkpoint."""
    shutil.rmtree(_rename_to_delete(folder))


def set_aside_after(root: Path, step: int, resumed: Path | None) -> Path | None:
    """Move everything later than `step` into a new folder, point `latest` to `resumed`, and return the folder.

    Folders beside a checkpoint that begin with its name, such as exports, move with it. Does nothing, and returns None,
    if there is nothing later. If it is interrupted, calling it again completes it.
    """
    later = {folder: found for folder in root.iterdir() if (found := step_of(folder) or 0) > step}
    if not later:
        return None
    numbers = [path.name.removeprefix(SET_ASIDE) for path in root.glob(f"{SET_ASIDE}*")]
    number = 1 + max((int(text) for text in numbers if text.isdecimal()), default=0)
    aside = root / f"{SET_ASIDE}{number}"
    aside.mkdir()
    # The last first: an interruption leaves the same order of checkpoints, only fewer.
    for folder in sorted(later, key=lambda folder: -later[folder]):
        for path in [*root.glob(f"{folder.name}-*"), folder]:
            path.rename(aside / path.name)
    sync_file(aside)
    if resumed is not None and resumed.parent == root:
        _point_to(resumed)
    else:
        (root / LATEST).unlink(missing_ok=True)
        sync_file(root)
    return aside


def complete_interrupted(root: Path) -> None:
    """Finish what a process that died had begun: remove its leftovers, and let `latest` name the newest checkpoint."""
    remove_leftovers(root)
    newest = latest_checkpoint(root, warns=False)  # whoever resumes from it has been warned
    if newest is not None and newest != named_by_latest(root)[0]:
        _point_to(newest)


def _point_to(checkpoint: Path) -> None:
    root = checkpoint.parent
    pointer = root / f"{SAVING}{LATEST}_{secrets.token_hex(4)}"
    write_file(pointer, f"{checkpoint.name}\n".encode())
    pointer.replace(root / LATEST)
    sync_file(root)


def remove_leftovers(root: Path) -> None:
    """Remove what interrupted saves and removals left, except that of processes that are alive."""
    for leftover in root.iterdir():
        if not leftover.name.startswith((SAVING, DELETING)):
            continue
        folder = leftover.with_name(leftover.name.removesuffix(_OWNER).removesuffix(_POINTER))
        if folder in _OWNED or _is_locked(_owner_of(folder)):
            continue
        logger.warning("event=leftover_removed path=%s", leftover)
        # Several processes may remove the same one.
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _rename_to_delete(folder: Path) -> Path:
    """Renamed before it is deleted, because a partly deleted checkpoint must not look complete."""
    return folder.rename(folder.with_name(f"{DELETING}{folder.name}_{secrets.token_hex(4)}"))


def _owner_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{_OWNER}")


def _is_locked(owner: Path) -> bool:
    """Whether the process that created this file still lives; False if the file system has no locks."""
    try:
        with owner.open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    return False


def _release(folder: Path) -> None:
    with suppress(OSError):  # the next save removes it
        _owner_of(folder).unlink(missing_ok=True)
    if (file := _OWNED.pop(folder, None)) is not None:
        with suppress(OSError):  # on a full disk, its text may still be waiting to be written
            file.close()


def _complete(folder: Path, manifest: Manifest) -> None:
    """Check that rank 0 sees the files of all ranks, and write the manifest."""
    absent = [name for name in manifest.files if not (folder / name).exists()]
    if absent:
        raise CheckpointError(
            f"{folder.parent} is not the same folder on every node: rank 0 does not see {', '.join(absent[:5])}. "
            "Save checkpoints to a file system that all nodes share."
        )
    if problems := size_problems(folder, manifest.files):
        raise CheckpointFailure(f"{folder} is not as it was written: {', '.join(problems[:5])}")
    write_file(folder / MANIFEST, manifest.to_json().encode())
    sync_file(folder / TRAINING_STATE)
    sync_file(folder)
