"""Tar archives that are generated while they are sent, without holding them in memory or on disk."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class Archive:
    """A tar archive of files in a folder. Its bytes depend only on the files' names, order, contents and times."""

    folder: Path
    headers: Sequence[tuple[bytes, str, int]]

    @classmethod
    def of(cls, folder: Path, names: Sequence[str]) -> Archive:
        """names: regular files, relative to `folder`, with slashes. Raises OSError if one does not exist."""
        headers: list[tuple[bytes, str, int]] = []
        for name in names:
            status = (folder / name).stat()
            # Owners and permissions are left out, since they are meaningless on other machines.
            info = tarfile.TarInfo(name)
            info.size, info.mtime = status.st_size, int(status.st_mtime)
            headers.append((info.tobuf(tarfile.PAX_FORMAT), name, status.st_size))
        return cls(folder, headers)

    @property
    def num_bytes(self) -> int:
        """The size of the whole archive."""
        return sum(len(header) + size + _padding(size) for header, _, size in self.headers) + len(_END)

    def __iter__(self) -> Iterator[bytes]:
        """The archive's bytes in chunks. Raises RuntimeError if a file became shorter, and OSError if it was deleted.

        The response then ends before its announced length, so the client notices.
        """
        for header, name, size in self.headers:
            yield header
            left = size
            with (self.folder / name).open("rb") as file:
                while left:
                    chunk = file.read(min(_CHUNK_BYTES, left))
                    if not chunk:
                        raise RuntimeError(f"{self.folder / name} became shorter while it was sent")
                    left -= len(chunk)
                    yield chunk
            yield bytes(_padding(size))
        yield _END


_END = bytes(2 * tarfile.BLOCKSIZE)


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE
