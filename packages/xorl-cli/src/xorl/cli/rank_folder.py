"""The folder in which a launcher and its ranks leave notes for each other: made by the launcher, removed at its end.

All of them keep a shared lock on the launcher's note, so that the folder of a launcher that was killed is told from one
that is in use: the next launcher takes the lock and removes it.
"""

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# Some file systems that hosts share have locks of one host alone.
PREFIX = f"xorl_ranks_{socket.gethostname()}_"
NOTES = "notes"
LAUNCHER_FILE = "launcher"


@contextmanager
def rank_folder() -> Iterator[Path]:
    """Yields a new folder, whose `notes` are for the ranks; removes it afterwards, and before it what is left over."""
    _remove_left_over()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        notes = Path(name) / NOTES
        notes.mkdir()
        temporary = notes / f"{LAUNCHER_FILE}.tmp"
        with temporary.open("w") as note:
            _keep(note)
            note.write(str(os.getpid()))
            note.flush()
            temporary.rename(notes / LAUNCHER_FILE)
            yield Path(name)


@contextmanager
def kept_for_rank(notes: Path) -> Iterator[int]:
    """While entered, the folder of these notes stays; yields the process that started the ranks."""
    with (notes / LAUNCHER_FILE).open() as note:
        _keep(note)
        yield int(note.read())


def _keep(note: IO[str]) -> None:
    with suppress(OSError):  # without locks, nothing that is left over can be locked either, and it stays
        fcntl.flock(note, fcntl.LOCK_SH)


def _remove_left_over() -> None:
    for note in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{NOTES}/{LAUNCHER_FILE}"):
        # OSError: it is in use, it is another user's, or another launcher removes it.
        with suppress(OSError), note.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(note.parent.parent, ignore_errors=True)
