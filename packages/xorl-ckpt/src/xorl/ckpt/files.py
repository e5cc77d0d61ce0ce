"""Writes files durably, hashing them on the way, and verifies files against recorded sizes and hashes."""

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

from xorl.ckpt.errors import CheckpointError

# Reads of this size run at page-cache speed; larger ones only cost memory.
READ_BYTES = 8 << 20
# Errors that choosing another folder resolves; other errors mean a full or broken disk.
_WRONG_FOLDER = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG}


@dataclass(frozen=True)
class FileRecord:
    """The expected content of a file: its size in bytes and its hexadecimal xxh3_128."""

    size: int
    xxh3_128: str


class HashedFile:
    """A write-only stream; closing it makes the file durable and sets its `record`.

    The hash covers the bytes passed in rather than the bytes on disk, so it also detects a corrupted write.
    """

    record: FileRecord

    def __init__(self, path: Path) -> None:
        # Unbuffered: a failed write raises at once, and closing has nothing left to write.
        self._file = path.open("xb", buffering=0)
        self._hash = xxhash.xxh3_128()
        self._size = 0
        self._failure: OSError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        self._file.close()
        if self._failure is not None and error is not self._failure:
            # torch's writer replaces the error of a failed write by one about file positions.
            raise self._failure

    def write(self, data: bytes | bytearray | memoryview) -> int:
        rest = memoryview(data).cast("B")
        num_bytes = rest.nbytes
        self._hash.update(rest)
        try:
            while rest.nbytes:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as error:
            error.filename = self._file.name
            self._failure = error
            raise
        self._size += num_bytes
        return num_bytes

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Does nothing: the file is unbuffered."""

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        if self._file.closed:
            return
        os.fsync(self._file.fileno())
        self._file.close()
        self.record = FileRecord(self._size, self._hash.hexdigest())

    def abort(self) -> None:
        """Close without a record, after an error; does nothing if the file is already closed."""
        self._file.close()


def write_file(path: Path, content: bytes) -> FileRecord:
    """Write a new file durably."""
    with HashedFile(path) as stream:
        stream.write(content)
    return stream.record


def hash_file(path: Path) -> FileRecord:
    """Return the size and hash of a file. Reads all of it."""
    hasher, size = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as stream:
        while num_bytes := stream.readinto(buffer):
            hasher.update(buffer[:num_bytes])
            size += num_bytes
    return FileRecord(size, hasher.hexdigest())


def size_problems(folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """A line for every file that is missing or has the wrong size."""
    problems: list[str] = []
    for name, record in files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            problems.append(f"{name} is missing")
            continue
        if size != record.size:
            problems.append(f"{name} has {size:,} bytes, but {record.size:,} were saved")
    return problems


def hash_problems(folder: Path, files: Mapping[str, FileRecord], names: Iterable[str]) -> list[str]:
    """A line for every file among `names` whose content differs from its record. Reads all of them."""
    changed = [name for name in names if hash_file(folder / name) != files[name]]
    return [f"{name} has changed since it was saved (its xxh3_128 differs)" for name in changed]


def share_of_files(files: Mapping[str, FileRecord], rank: int, num_ranks: int) -> list[str]:
    """The files that `rank` checks. Files go, largest first, to the rank with the fewest bytes; all ranks agree."""
    loads = [0] * num_ranks
    shares: list[list[str]] = [[] for _ in range(num_ranks)]
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        lightest = loads.index(min(loads))
        loads[lightest] += files[name].size
        shares[lightest].append(name)
    return shares[rank]


@contextmanager
def writing_to(folder: Path, argument: str) -> Iterator[None]:
    """Raise errors that another folder resolves as CheckpointError, which names the argument that sets the folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in _WRONG_FOLDER:
            raise
        raise CheckpointError(
            f"{argument}: cannot write to {folder}: {error.strerror}. Choose a writable folder."
        ) from error


def sync_file(path: Path) -> None:
    """Sync an existing file, or the list of a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
