"""Private temporary folders that exist as long as any process uses them.

Each folder contains a note that names its creator, and every process that uses the folder holds a shared lock on the
note. The next process that creates a folder therefore recognizes, and removes, folders left behind by killed processes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

PREFIX = "xorl_"
NOTE = "maker"


class TemporaryFolder(NamedTuple):
    """A folder that only this user may enter. It is kept while any process has the file descriptor `lock` open."""

    path: Path
    lock: int


@contextmanager
def temporary_folder() -> Iterator[TemporaryFolder]:
    """Yields a new folder and removes it on exit. Removes the folders of killed processes first."""
    _remove_abandoned()
    creator = os.getpid()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        temporary = folder / f"{NOTE}.tmp"
        with temporary.open("w") as note:
            _lock_shared(note)
            note.write(f"{creator} {socket.gethostname()}")
            note.flush()
            temporary.rename(folder / NOTE)
            yield TemporaryFolder(folder, note.fileno())
    finally:
        # Forked processes inherit this context, but must not remove the folder.
        if os.getpid() == creator:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def keep_folder(folder: Path) -> Iterator[int]:
    """Keeps a temporary folder created by another process while entered; yields that process's id."""
    with (folder / NOTE).open() as note:
        _lock_shared(note)
        yield int(note.read().split()[0])


def _lock_shared(note: IO[str]) -> None:
    # Ignored on a file system without locks: _remove_abandoned fails to lock as well, and removes nothing.
    with suppress(OSError):
        fcntl.flock(note, fcntl.LOCK_SH)


def _remove_abandoned() -> None:
    for note in filter(Path.is_file, Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{NOTE}")):
        # OSError: the folder is in use, belongs to another user, or is being removed by another process.
        # ValueError: the note is not text.
        with suppress(OSError, ValueError), note.open("r+") as file:
            # On file systems shared between hosts, locks may only be visible on one host.
            if file.read().partition(" ")[2] == socket.gethostname():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(note.parent, ignore_errors=True)
