"""Storage for the adapters of a bank that are not on the device: host memory, and above a limit disk."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from pathlib import Path

from xorl.lora.snapshot import AdapterSnapshot

logger = logging.getLogger(__name__)


class Pages:
    """Adapters by name; the first one stored is the first to move to disk.

    Args:
        host_limit: how many stay in host memory; None for all. Others are files.
        folder: for the files; only this object uses it. A file is removed when its adapter is loaded.
    """

    def __init__(self, *, host_limit: int | None, folder: Path | None) -> None:
        if host_limit is not None and host_limit < 0:
            raise ValueError(f"host_limit must be at least 0, got {host_limit}")
        if host_limit is not None and folder is None:
            raise ValueError(f"host_limit is {host_limit}, and beyond it adapters go to disk: name a folder")
        self._host_limit = host_limit
        self._folder = folder
        self._in_memory: OrderedDict[str, AdapterSnapshot] = OrderedDict()
        self._on_disk: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._in_memory or name in self._on_disk

    def put(self, name: str, snapshot: AdapterSnapshot) -> None:
        """Store an adapter."""
        assert name not in self, f"{name} is put away already"
        self._in_memory[name] = snapshot
        while self._host_limit is not None and len(self._in_memory) > self._host_limit:
            oldest = next(iter(self._in_memory))
            path = self._path(oldest)
            path.parent.mkdir(parents=True, exist_ok=True)
            # On a full disk it stays in memory, and the caller gets the error.
            self._in_memory[oldest].write(path)
            del self._in_memory[oldest]
            self._on_disk.add(oldest)
            logger.debug("event=adapter_to_disk name=%s path=%s", oldest, path)

    def look(self, name: str) -> AdapterSnapshot:
        """A stored adapter, which stays stored. Raises RuntimeError if its file is missing or damaged."""
        if name in self._in_memory:
            return self._in_memory[name]
        try:
            return AdapterSnapshot.read(self._path(name))
        except (OSError, ValueError) as error:
            raise RuntimeError(f"adapter {name}: what was put away on disk cannot be read: {error}") from error

    def take(self, name: str) -> AdapterSnapshot:
        """A stored adapter, which is removed from here."""
        snapshot = self.look(name)
        self.drop(name)
        return snapshot

    def drop(self, name: str) -> None:
        """Forget an adapter."""
        self._in_memory.pop(name, None)
        if name in self._on_disk:
            self._on_disk.remove(name)
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        assert self._folder is not None, "checked when it was made"
        # Names may contain any characters; the file name is derived from it.
        return self._folder / f"{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}.safetensors"
