"""Files as a tar archive that is made while it is sent: neither memory nor disk ever holds it."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class Archive:
    """A tar archive of files of a folder, in the order of `names`. Equal files of equal times give equal bytes."""

    folder: Path
    headers: Sequence[tuple[bytes, str, int]]

    @classmethod
    def of(cls, folder: Path, names: Sequence[str]) -> Archive:
        """names: of regular files, relative to `folder`, with slashes. Raises OSError where one is gone."""
        headers: list[tuple[bytes, str, int]] = []
        for name in names:
            status = (folder / name).stat()
            # Whose they are here, and who may read them, says nothing elsewhere.
            info = tarfile.TarInfo(name)
            info.size, info.mtime = status.st_size, int(status.st_mtime)
            headers.append((info.tobuf(tarfile.PAX_FORMAT), name, status.st_size))
        return cls(folder, headers)

    @property
    def num_bytes(self) -> int:
        """Of the whole archive."""
        return sum(len(header) + size + _padding(size) for header, _, size in self.headers) + len(_END)

    def __iter__(self) -> Iterator[bytes]:
        """Its bytes, piece by piece. Raises RuntimeError where a file is shorter than it was, OSError where it is gone.

        Whoever receives it then notices by the length that was announced.
        """
        for header, name, size in self.headers:
            yield header
            left = size
            with (self.folder / name).open("rb") as file:
                while left:
                    piece = file.read(min(_PIECE_BYTES, left))
                    if not piece:
                        raise RuntimeError(f"{self.folder / name} has become shorter while it was sent")
                    left -= len(piece)
                    yield piece
            yield bytes(_padding(size))
        yield _END


_END = bytes(2 * tarfile.BLOCKSIZE)


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE
