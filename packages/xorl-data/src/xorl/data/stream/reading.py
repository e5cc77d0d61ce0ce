"""Reads one block of a stream in place. A block yields the same chunks on every machine."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pa_parquet

from xorl.data.chunks import Chunk, LinesChunk
from xorl.data.downloads import with_retries
from xorl.data.errors import DataError
from xorl.data.readers import FileType, line_chunks_of, parquet_chunks, read_chunks
from xorl.data.remote import RemoteFile, Storage, is_url, storage_of

_NEWLINE_BYTES = 64 << 10
_COMMIT = re.compile(r"hf://[^@]+@[0-9a-f]{40}/")
_STORAGES: dict[tuple[int, str, str], Storage] = {}
_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


@dataclass(frozen=True)
class StreamFile:
    """One file and its blocks: `block_bytes` bytes each, or row groups [groups[i], groups[i + 1]), or the whole file.

    `version` changes with the content.
    """

    path: str
    size: int
    version: str
    ds_type: FileType
    num_blocks: int
    block_bytes: int | None = None
    groups: tuple[int, ...] = ()


def block_chunks(file: StreamFile, block: int, selected: Sequence[str] | None, option: str) -> Iterator[Chunk]:
    """Yields the chunks of block `block` of a file. Raises DataError if it cannot be read or has changed."""
    with open_file(file.path, file.size, file.version, option) as opened:
        if file.block_bytes is not None:
            chunk = _block_lines(file, block, opened)
            if chunk is not None:
                yield chunk
        elif file.groups:
            with pa_parquet.ParquetFile(opened) as table:
                groups = range(file.groups[block], file.groups[block + 1])
                yield from parquet_chunks(table, file.path, selected, groups)
        elif is_url(file.path):
            codec = _CODECS.get(Path(file.path.partition("?")[0]).suffix.lower())
            if codec is None or file.ds_type not in ("json", "text"):
                raise DataError(
                    f"{option}.path: {file.path}: only lines (also .gz, .bz2, .zst) and Parquet can be streamed from a "
                    "URL; convert the file, or call prepare() instead to download it"
                )
            with pa.CompressedInputStream(pa.PythonFile(opened, mode="r"), codec) as stream:
                as_json = file.ds_type == "json"
                yield from line_chunks_of(stream, Path(file.path), as_json=as_json, url=file.path)
        else:
            yield from read_chunks(Path(file.path), file.ds_type, selected)


def open_file(path: str, size: int, version: str, option: str) -> BinaryIO:
    """Opens a file for reading and seeking. Raises DataError if it has changed since the stream was opened."""
    if is_url(path):
        storage = _storage(path.split("://", 1)[0], path, option)
        file = RemoteFile(path, size, version or None)
        # Web servers return the version with every range, and a commit of the Hub never changes.
        if not path.startswith("http") and _COMMIT.match(path) is None:
            now = with_retries(partial(storage.stat, path), path)
            if now is None or (now.size, now.version) != (file.size, file.version):
                raise DataError(f"{option}.path: {path} changed while it was streamed; start a new run")
        reader = RemoteReader(storage, file)
        return io.BufferedReader(reader, 1 << 20)
    try:
        opened = Path(path).open("rb")  # noqa: SIM115 - the caller closes it
        stat = Path(path).stat()
    except OSError as error:
        raise DataError(f"{option}.path: {path} cannot be read: {error.strerror}") from error
    if (stat.st_size, str(stat.st_mtime_ns)) != (size, version):
        opened.close()
        raise DataError(f"{option}.path: {path} changed while it was streamed; start a new run")
    return opened


class RemoteReader(io.RawIOBase):
    """A remote file as a seekable stream; each read is a separate request with retries."""

    def __init__(self, storage: Storage, file: RemoteFile) -> None:
        self._storage = storage
        self._file = file
        self._offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._file.size or 0}[whence]
        self._offset = max(0, base + offset)
        return self._offset

    def tell(self) -> int:
        return self._offset

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        stop = min(self._offset + len(buffer), self._file.size or 0)
        if stop <= self._offset:
            return 0
        data = with_retries(partial(self._range, self._offset, stop), self._file.url)
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)

    def _range(self, start: int, stop: int) -> bytes:
        offset, blocks = self._storage.read(self._file, start, stop)
        if offset != start:
            raise DataError(
                f"{self._file.url}: the server does not support range requests, so the file cannot be streamed; call "
                "prepare() instead to download it"
            )
        return b"".join(blocks)


def _storage(scheme: str, url: str, option: str) -> Storage:
    # Keyed by process, because fsspec's connections do not survive a fork.
    key = (os.getpid(), scheme, option)
    if key not in _STORAGES:
        _STORAGES[key] = storage_of(url, option)
    return _STORAGES[key]


def starts_with_array(file: BinaryIO) -> bool:
    """Whether a JSON file is one array rather than one object per line."""
    return file.read(4096).lstrip(b" \t\r\n\xef\xbb\xbf").startswith(b"[")


def _block_lines(file: StreamFile, block: int, opened: BinaryIO) -> LinesChunk | None:
    """The lines that start within the bytes of a block; None if no line does."""
    assert file.block_bytes is not None
    low = block * file.block_bytes
    high = min(low + file.block_bytes, file.size)
    start = _line_start(opened, low, file.size)
    stop = _line_start(opened, high, file.size)
    if start >= stop:
        return None
    opened.seek(start)
    data = opened.read(stop - start)
    url = file.path if is_url(file.path) else None
    return LinesChunk(Path(file.path), file.ds_type == "json", start, stop, data, url=url)


def _line_start(opened: BinaryIO, offset: int, size: int) -> int:
    """The offset of the first line that starts at `offset` or later; `size` if no line does."""
    if offset == 0 or offset >= size:
        return min(offset, size)
    opened.seek(offset - 1)
    start = offset - 1
    while block := opened.read(_NEWLINE_BYTES):
        newline = block.find(b"\n")
        if newline >= 0:
            return start + newline + 1
        start += len(block)
    return size
