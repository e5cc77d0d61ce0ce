"""Reads one block of a stream in place: its pieces, the same on every machine."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

import pyarrow as pa
import pyarrow.parquet as pa_parquet

from xorl.data.downloads import with_retries
from xorl.data.errors import DataError
from xorl.data.readers import FileType, LinesPiece, Piece, line_pieces_of, parquet_pieces, read_pieces
from xorl.data.remote import RemoteFile, Storage, is_url, storage_of

_NEWLINE_BYTES = 64 << 10
_COMMIT = re.compile(r"hf://[^@]+@[0-9a-f]{40}/")
_STORAGES: dict[tuple[int, str, str], Storage] = {}
_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


class BlockFile(Protocol):
    """The attributes of a file that reading needs; see files.py."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def version(self) -> str: ...

    @property
    def ds_type(self) -> FileType: ...

    @property
    def block_bytes(self) -> int | None: ...

    @property
    def groups(self) -> tuple[int, ...]: ...


def block_pieces(file: BlockFile, block: int, selected: Sequence[str] | None, option: str) -> Iterator[Piece]:
    """The pieces of block `block` of a file. DataError if it cannot be read or has changed."""
    with open_file(file.path, file.size, file.version, option) as opened:
        if file.block_bytes is not None:
            piece = _lines(file, block, opened)
            if piece is not None:
                yield piece
        elif file.groups:
            with pa_parquet.ParquetFile(opened) as table:
                groups = range(file.groups[block], file.groups[block + 1])
                yield from parquet_pieces(table, file.path, selected, groups)
        elif is_url(file.path):
            codec = _CODECS.get(Path(file.path.partition("?")[0]).suffix.lower())
            if codec is None or file.ds_type not in ("json", "text"):
                raise DataError(
                    f"{option}.path: {file.path}: of what lies at a distance, lines (also .gz, .bz2, .zst) and Parquet "
                    "can be streamed; convert it, or set data.streaming: false to download it"
                )
            with pa.CompressedInputStream(pa.PythonFile(opened, mode="r"), codec) as stream:
                as_json = file.ds_type == "json"
                yield from line_pieces_of(stream, Path(file.path), as_json=as_json, url=file.path)
        else:
            yield from read_pieces(Path(file.path), file.ds_type, selected)


def open_file(path: str, size: int, version: str, option: str) -> BinaryIO:
    """Opens a file to read and seek in. DataError if a local one has changed in size or time."""
    if is_url(path):
        storage = _storage(path.split("://", 1)[0], path, option)
        file = RemoteFile(path, size, version or None)
        # A web server reports it with every part it returns, and a commit of the Hub never changes.
        if not path.startswith("http") and _COMMIT.match(path) is None:
            now = with_retries(partial(storage.stat, path), path)
            if now is None or (now.size, now.version) != (file.size, file.version):
                raise DataError(f"{option}.path: {path} was changed while it was streamed; start a new run on it")
        reader = RemoteReader(storage, file)
        return io.BufferedReader(reader, 1 << 20)
    try:
        opened = Path(path).open("rb")  # noqa: SIM115 - the caller closes it
        stat = Path(path).stat()
    except OSError as error:
        raise DataError(f"{option}.path: {path} cannot be read: {error.strerror}") from error
    if (stat.st_size, str(stat.st_mtime_ns)) != (size, version):
        opened.close()
        raise DataError(f"{option}.path: {path} was changed while it was streamed; start a new run on what it is now")
    return opened


class RemoteReader(io.RawIOBase):
    """A remote file as a seekable stream; each read is a separate request with retries."""

    def __init__(self, storage: Storage, file: RemoteFile) -> None:
        self._storage = storage
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size or 0}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        stop = min(self._at + len(buffer), self._file.size or 0)
        if stop <= self._at:
            return 0
        data = with_retries(partial(self._range, self._at, stop), self._file.url)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _range(self, start: int, stop: int) -> bytes:
        begins, blocks = self._storage.read(self._file, start, stop)
        if begins != start:
            raise DataError(
                f"{self._file.url}: its server gives no parts of files, so it cannot be streamed; set "
                "data.streaming: false to download it"
            )
        return b"".join(blocks)


def _storage(scheme: str, url: str, option: str) -> Storage:
    # Per process: fsspec's connections do not survive a fork.
    key = (os.getpid(), scheme, option)
    if key not in _STORAGES:
        _STORAGES[key] = storage_of(url, option)
    return _STORAGES[key]


def starts_an_array(file: BinaryIO) -> bool:
    """Whether a JSON file holds one array, and not one object per line."""
    return file.read(4096).lstrip(b" \t\r\n\xef\xbb\xbf").startswith(b"[")


def _lines(file: BlockFile, block: int, opened: BinaryIO) -> LinesPiece | None:
    """The lines that begin in the bytes of a block; None if no line does."""
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
    return LinesPiece(Path(file.path), file.ds_type == "json", start, stop, data, url=url)


def _line_start(opened: BinaryIO, at: int, size: int) -> int:
    """The first line that begins at byte `at` or later; `size` if no line does."""
    if at == 0 or at >= size:
        return min(at, size)
    opened.seek(at - 1)
    position = at - 1
    while block := opened.read(_NEWLINE_BYTES):
        newline = block.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        position += len(block)
    return size
