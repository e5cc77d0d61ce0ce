"""Private folders in the temporary one, for as long as processes use them.

Each has a note of who made it, on which all that use the folder keep a shared lock. So what killed processes left is
told from what is in use, and the next one that makes a folder removes it.
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
    """A folder that only this user may enter; it stays while a process has the file descriptor `lock` open."""

    path: Path
    lock: int


@contextmanager
def temporary_folder() -> Iterator[TemporaryFolder]:
    """Yields a new folder and removes it afterwards; before, it removes what killed processes left."""
    _remove_left_over()
    maker = os.getpid()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        temporary = folder / f"{NOTE}.tmp"
        with temporary.open("w") as note:
            _keep(note)
            note.write(f"{maker} {socket.gethostname()}")
            note.flush()
            temporary.rename(folder / NOTE)
            yield TemporaryFolder(folder, note.fileno())
    finally:
        # What it forks inherits this.
        if os.getpid() == maker:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def kept(folder: Path) -> Iterator[int]:
    """While entered, a folder that another process made stays; yields the id of that process."""
    with (folder / NOTE).open() as note:
        _keep(note)
        yield int(note.read().split()[0])


def _keep(note: IO[str]) -> None:
    with suppress(OSError):  # without locks, nothing that is left over can be locked either, and it stays
        fcntl.flock(note, fcntl.LOCK_SH)


def _remove_left_over() -> None:
    for note in filter(Path.is_file, Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{NOTE}")):
        # OSError: it is in use, it is another user's, or another process removes it. ValueError: it is no text.
        with suppress(OSError, ValueError), note.open("r+") as file:
            # Some file systems that hosts share have locks of one host alone.
            if file.read().partition(" ")[2] == socket.gethostname():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(note.parent, ignore_errors=True)
