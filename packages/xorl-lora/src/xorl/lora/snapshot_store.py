"""Storage for the adapters of a bank that are not on the device: host memory, and disk above a limit."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from pathlib import Path

from xorl.lora.snapshot import AdapterSnapshot

logger = logging.getLogger(__name__)


class SnapshotStore:
    """Snapshots by name; the one stored first is the first to move to disk.

    Args:
        host_limit: how many to keep in host memory; None for all. Others are written to files.
        folder: for the files; not to be shared with another store. A file is removed with its snapshot.
    """

    def __init__(self, *, host_limit: int | None, folder: Path | None) -> None:
        if host_limit is not None and host_limit < 0:
            raise ValueError(f"host_limit must be at least 0, got {host_limit}")
        if host_limit is not None and folder is None:
            raise ValueError(
                f"host_limit is {host_limit}, but there is no folder for the adapters above it: pass folder"
            )
        self._host_limit = host_limit
        self._folder = folder
        self._in_memory: OrderedDict[str, AdapterSnapshot] = OrderedDict()
        self._on_disk: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._in_memory or name in self._on_disk

    def put(self, name: str, snapshot: AdapterSnapshot) -> None:
        """Store a snapshot, and move the oldest ones to disk if there are too many."""
        assert name not in self, f"{name} is already stored"
        self._in_memory[name] = snapshot
        while self._host_limit is not None and len(self._in_memory) > self._host_limit:
            oldest = next(iter(self._in_memory))
            path = self._path(oldest)
            path.parent.mkdir(parents=True, exist_ok=True)
            # If writing fails, it stays in memory, and the error is raised.
            self._in_memory[oldest].write(path)
            del self._in_memory[oldest]
            self._on_disk.add(oldest)
            logger.debug("event=adapter_to_disk name=%s path=%s", oldest, path)

    def get(self, name: str) -> AdapterSnapshot:
        """A stored snapshot. Raises RuntimeError if its file is missing or damaged."""
        if name in self._in_memory:
            return self._in_memory[name]
        try:
            return AdapterSnapshot.read(self._path(name))
        except (OSError, ValueError) as error:
            raise RuntimeError(f"adapter {name}: its file on disk cannot be read: {error}") from error

    def drop(self, name: str) -> None:
        """Remove a snapshot, if it is stored."""
        self._in_memory.pop(name, None)
        if name in self._on_disk:
            self._on_disk.remove(name)
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        assert self._folder is not None, "checked in __init__"
        # Hashed, because names may contain any characters.
        return self._folder / f"{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}.safetensors"
