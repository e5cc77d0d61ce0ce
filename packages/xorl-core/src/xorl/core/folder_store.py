"""FolderStore: a store in a folder, for values that change often."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import torch.distributed as dist


class FolderStore:
    """Keeps each value in a file that the next value replaces; torch's FileStore grows with every value.

    Uses no locks, so a stopped process never blocks another one. Raises torch's DistStoreError if the folder is gone.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        with self._written(key, value) as file:
            file.replace(self._file(key))

    def get(self, key: str) -> bytes:
        """The value of a key that has one."""
        with _store_errors():
            return self._file(key).read_bytes()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have a value."""
        with _store_errors():
            self._folder.stat()
            return all(self._file(key).exists() for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that has no value yet, and return its value; the first of several processes wins."""
        assert expected == "", "only the first value is compared"
        with self._written(key, desired) as file, suppress(FileExistsError):
            os.link(file, self._file(key))
        return self.get(key)

    def _file(self, key: str) -> Path:
        return self._folder / quote(key, safe="")

    @contextmanager
    def _written(self, key: str, value: str) -> Iterator[Path]:
        """A temporary file of this thread with the value."""
        file = self._folder / f"{quote(key, safe='')}.{os.getpid()}.{threading.get_ident()}"
        with _store_errors():
            file.write_text(value, encoding="utf-8")
            try:
                yield file
            finally:
                file.unlink(missing_ok=True)


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise dist.DistStoreError(f"the job's store is gone: {error}") from error
