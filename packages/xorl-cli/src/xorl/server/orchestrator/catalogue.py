"""Checkpoint folders on disk: finds, measures and deletes them, and checks that there is storage for more."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from xorl.server.identifiers import CheckpointKind, CheckpointRef, check_name, checkpoint_folder, model_id_in_folder
from xorl.server.orchestrator.operation_properties import RECOVERY_PREFIX
from xorl.server.sizes import readable_size
from xorl.server.status_queries import StoredKind, StoredName

# Kept free on the disk, so that the file system stays usable while a checkpoint is written.
FREE_MARGIN_BYTES = 64 * 2**20
_STORED_NAMES: Mapping[CheckpointKind, StoredName] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


class StorageLimitError(Exception):
    """There is no storage for a checkpoint; the message has sizes and the remedy. missing_bytes: how much to free."""

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(f"StorageLimitError: {message}")
        self.missing_bytes = missing_bytes


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint on disk. created: seconds since 1970."""

    checkpoint: CheckpointRef
    created: float
    size_bytes: int


def scan(output_dir: Path, model_id: str | None = None) -> list[CheckpointFolder]:
    """All complete checkpoints, or those of one model, newest first."""
    found = [
        CheckpointFolder(ref, entry.stat().st_mtime, size_of(Path(entry.path)))
        for ref, entry in _entries(output_dir, model_id)
    ]
    return sorted(found, key=lambda one: one.created, reverse=True)


def list_refs(output_dir: Path) -> list[CheckpointRef]:
    """References to all complete checkpoints, without their sizes."""
    return [ref for ref, _ in _entries(output_dir, None)]


def find(output_dir: Path, checkpoint: CheckpointRef) -> CheckpointFolder | None:
    """One checkpoint, or None if it does not exist."""
    folder = checkpoint_folder(output_dir, checkpoint)
    if not folder.is_dir():
        return None
    return CheckpointFolder(checkpoint, folder.stat().st_mtime, size_of(folder))


def exists(output_dir: Path, checkpoint: CheckpointRef) -> bool:
    """Whether a checkpoint exists."""
    return checkpoint_folder(output_dir, checkpoint).is_dir()


def manifest(output_dir: Path, checkpoint: CheckpointRef) -> Mapping[str, Any]:
    """The metadata.json that the workers wrote; empty for an export, or if it cannot be read."""
    try:
        return json.loads((checkpoint_folder(output_dir, checkpoint) / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def delete(output_dir: Path, checkpoint: CheckpointRef) -> bool:
    """Delete a checkpoint; it disappears atomically. Returns False if it does not exist."""
    folder = checkpoint_folder(output_dir, checkpoint)
    hidden = folder.with_name(f".deleting_{folder.name}_{secrets.token_hex(4)}")
    try:
        folder.rename(hidden)
    except FileNotFoundError:
        return False
    shutil.rmtree(hidden, ignore_errors=True)
    return True


def rename(output_dir: Path, checkpoint: CheckpointRef, new: CheckpointRef) -> None:
    """Give a checkpoint another name, which must be free."""
    checkpoint_folder(output_dir, checkpoint).rename(checkpoint_folder(output_dir, new))


def measure(output_dir: Path) -> list[StoredKind]:
    """The storage that each kind of files takes."""
    counts, sizes = Counter[StoredName](), Counter[StoredName]()
    total = _used_bytes(output_dir)
    for found in scan(output_dir):
        ref = found.checkpoint
        name = "recovery" if ref.name.startswith(RECOVERY_PREFIX) else _STORED_NAMES[ref.kind]
        counts[name] += 1
        sizes[name] += found.size_bytes
    # Files may have been written between the two measurements.
    sizes["other"] = max(total - sizes.total(), 0)
    return [StoredKind(name, counts[name], sizes[name]) for name in get_args(StoredName)]


def check_storage(output_dir: Path, kind: CheckpointKind, limit_bytes: int, new_bytes: int) -> None:
    """Raise StorageLimitError unless new_bytes more of a kind fit within the limit and on the disk."""
    used = _used_bytes(output_dir)
    if used + new_bytes > limit_bytes:
        raise StorageLimitError(
            f"{output_dir} holds {readable_size(used)} and this would add about "
            f"{readable_size(new_bytes)}, but storage_limit is {readable_size(limit_bytes)}: delete checkpoints, or "
            "start the service with a higher storage_limit",
            used + new_bytes - limit_bytes,
        )
    disk = output_dir / kind if (output_dir / kind).exists() else output_dir
    free = shutil.disk_usage(disk).free
    if new_bytes + FREE_MARGIN_BYTES > free:
        raise StorageLimitError(
            f"the disk of {disk} has {readable_size(free)} free, but this would take about "
            f"{readable_size(new_bytes)}: delete checkpoints, or free space on the disk",
            new_bytes + FREE_MARGIN_BYTES - free,
        )


def _used_bytes(output_dir: Path) -> int:
    linked = [output_dir / kind for kind in get_args(CheckpointKind) if (output_dir / kind).is_symlink()]
    return sum(size_of(folder) for folder in (output_dir, *linked))


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder; ignores files deleted meanwhile and does not follow links."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _entries(output_dir: Path, model_id: str | None) -> Iterator[tuple[CheckpointRef, os.DirEntry[str]]]:
    for kind in get_args(CheckpointKind):
        for folder in _folders(output_dir / kind):
            owner = _parsed(model_id_in_folder, folder.name)
            if owner is None or model_id not in (None, owner):
                continue
            for entry in _folders(Path(folder.path)):
                if _parsed(check_name, entry.name) is not None:
                    yield CheckpointRef(owner, kind, entry.name), entry


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _parsed(check: Callable[[str], str], name: str) -> str | None:
    try:
        return check(name)
    except ValueError:
        return None
