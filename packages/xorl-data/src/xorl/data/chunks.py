"""Chunks: consecutive rows of one source, read when needed; readers.py divides files into chunks.

A chunk offers its rows in two forms: `table` is fast, but None for irregular data; `rows` reads all valid data, and
raises a DataError with file and line for the rest. The formats interpret the rows.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.json as pa_json

from xorl.data.errors import DataError

Row = dict[str, object]

# Large enough to make the fixed cost per chunk negligible, small enough to hold several chunks per process in memory.
CHUNK_BYTES = 8 << 20


class DuplicateKeyError(ValueError):
    """A JSON object contains a key twice."""


def _unique_keys(pairs: list[tuple[str, object]]) -> Row:
    """Converts an object's pairs. Python's parser would silently keep the last of two values."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise DuplicateKeyError(f"has the key {twice!r} twice in one object; remove one of the two")
    return row


JSON_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)


class Chunk(Protocol):
    """Consecutive rows of one source."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def problems(self) -> tuple[str, ...]:
        """Errors, with their locations, of rows that the reader could not read and left out of the chunk."""
        ...

    def names(self) -> Sequence[str]:
        """The names of all columns, including columns that were not read; for JSON lines, those of the first row.

        Empty if that row cannot be read; `rows` then raises the error.
        """
        ...

    def may_have(self, columns: Collection[str]) -> bool:
        """Whether any row may have one of `columns`. Cheaper than reading the rows; never False if one has."""
        ...

    def table(self, columns: Sequence[str]) -> pa.Table | None:
        """Those of `columns` that exist; None if only `rows` can read the chunk."""
        ...

    def rows(self) -> list[Row]:
        """The rows. Raises the first DataError of `read`."""
        ...

    def read(self) -> list[Row | DataError]:
        """Each row, or the error in it."""
        ...

    def location(self, row: int) -> str:
        """The location of the chunk's row number `row`, for error messages: 'train.jsonl, line 12'."""
        ...

    def num_rows(self) -> int: ...


@dataclass(frozen=True)
class LinesChunk:
    """Whole lines of a JSON lines or text file: bytes [start, stop), or `data` if the file is compressed or remote."""

    path: Path
    as_json: bool
    start: int
    stop: int
    data: bytes | None = None
    first_line: int | None = None
    url: str | None = None

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def table(self, columns: Sequence[str]) -> pa.Table | None:
        if not self.as_json:
            return None
        data = self._bytes()
        # Other fields are skipped without parsing; a selected column that no row has is returned as all null.
        types = {"input_ids": pa.int32(), "labels": pa.int32(), "attention_mask": pa.int8()}
        schema = pa.schema([(name, pa.list_(types.get(name, pa.float32()))) for name in columns])
        try:
            table = pa_json.read_json(
                io.BytesIO(data),
                read_options=pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
                parse_options=pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
            )
        except pa.ArrowInvalid:
            return None
        # Arrow silently accepts two objects on one line, or one object on two lines.
        return table if table.num_rows == self._count_lines(data) else None

    @property
    def problems(self) -> tuple[str, ...]:
        return ()

    def names(self) -> Sequence[str]:
        if not self.as_json:
            return ("text",)
        first = next(self._lines(self._bytes()), b"")
        try:
            row: object = JSON_DECODER.decode(first.decode())
        except (ValueError, RecursionError):  # also for a repeated key; `rows` raises the error
            return ()
        return tuple(row) if isinstance(row, dict) else ()

    def may_have(self, columns: Collection[str]) -> bool:
        names = b"|".join(re.escape(name).encode() for name in columns)
        return self.as_json and bool(names) and re.search(rb'"(?:' + names + rb')"\s*:', self._bytes()) is not None

    def rows(self) -> list[Row]:
        return [self._row(line, index) for index, line in enumerate(self._lines(self._bytes()))]

    def read(self) -> list[Row | DataError]:
        rows: list[Row | DataError] = []
        for index, line in enumerate(self._lines(self._bytes())):
            try:
                rows.append(self._row(line, index))
            except DataError as error:
                rows.append(error)
        return rows

    def location(self, row: int) -> str:
        first, offsets = self._line_numbers
        if self.url is not None and self.first_line is None:
            return f"{self.url}, line {offsets[row] + 1} after byte {self.start}"
        return f"{self.url or self.path}, line {first + offsets[row]}"

    def num_rows(self) -> int:
        return self._count_lines(self._bytes())

    @cached_property
    def _line_numbers(self) -> tuple[int, list[int]]:
        """The number of the chunk's first line in the file (if that can be known), and each row's line in the chunk."""
        offsets = [number for number, line in enumerate(self._bytes().split(b"\n")) if line.strip()]
        return 0 if self.url is not None and self.first_line is None else self._first_line(), offsets

    def _bytes(self) -> bytes:
        if self.data is not None:
            data = self.data
        else:
            with self.path.open("rb") as file:
                file.seek(self.start)
                data = file.read(self.stop - self.start)
        check_encoding(data, self.url or str(self.path))
        return data.removeprefix(b"\xef\xbb\xbf") if self.start == 0 else data

    @staticmethod
    def _lines(data: bytes) -> Iterator[bytes]:
        return (line for line in data.split(b"\n") if line.strip())

    @classmethod
    def _count_lines(cls, data: bytes) -> int:
        return sum(1 for _ in cls._lines(data))

    def _first_line(self) -> int:
        if self.first_line is not None:
            return self.first_line
        # Counted only for an error message, since many gigabytes may precede this chunk.
        with self.path.open("rb") as file:
            remaining, line = self.start, 1
            while remaining:
                block = file.read(min(remaining, CHUNK_BYTES))
                remaining -= len(block)
                line += block.count(b"\n")
        return line

    def _row(self, line: bytes, index: int) -> Row:
        text = ""
        try:
            text = line.decode()
            row: object = JSON_DECODER.decode(text) if self.as_json else {"text": text.removesuffix("\r")}
        except UnicodeDecodeError as error:
            raise DataError(f"{self.location(index)} is not UTF-8: {error.reason} at byte {error.start}") from error
        except (json.JSONDecodeError, RecursionError) as error:
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise DataError(f"{self.location(index)} is not JSON: {reason}: {excerpt(text)}") from error
        except DuplicateKeyError as error:
            raise DataError(f"{self.location(index)} {error}: {excerpt(text)}") from error
        if not isinstance(row, dict):
            raise DataError(f"{self.location(index)} is {type(row).__name__}, want one JSON object: {excerpt(text)}")
        return {**row}


@dataclass(frozen=True)
class LoadedChunk:
    """Rows already in memory (or memory-mapped), as an Arrow table or as plain rows."""

    source: str
    unit: str
    first: int
    num_bytes: int
    content: pa.Table | list[Row]
    problems: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()  # names of columns that were not read

    def names(self) -> Sequence[str]:
        if isinstance(self.content, list):
            return tuple(dict.fromkeys(name for row in self.content for name in row))
        return (*self.content.column_names, *self.unread)

    def may_have(self, columns: Collection[str]) -> bool:
        return not set(columns).isdisjoint(self.names())

    def table(self, columns: Sequence[str]) -> pa.Table | None:
        if isinstance(self.content, list):
            return None
        return self.content.select([name for name in columns if name in self.content.column_names])

    def rows(self) -> list[Row]:
        if isinstance(self.content, list):
            return self.content
        rows = self.content.to_pylist()
        for field in self.content.schema:
            if _struct_depth(field.type) > 1:
                for row in rows:
                    row[field.name] = _without_nulls(row[field.name])
        return rows

    def read(self) -> list[Row | DataError]:
        return [*self.rows()]

    def location(self, row: int) -> str:
        return f"{self.source}, {self.unit} {self.first + row} (the first is 0)"

    def num_rows(self) -> int:
        return len(self.content)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # Pickling a slice of an Arrow array pickles the whole array; the stream format writes only the slice.
        content = self.content if isinstance(self.content, list) else _stream_of(self.content)
        fields = (self.source, self.unit, self.first, self.num_bytes, content, self.problems, self.unread)
        return _loaded_chunk, fields


def _struct_depth(kind: pa.DataType) -> int:
    """The nesting depth of structs."""
    if not pa.types.is_nested(kind):
        return 0
    fields = [kind.field(index).type for index in range(kind.num_fields)]
    return pa.types.is_struct(kind) + max(map(_struct_depth, fields), default=0)


def _without_nulls(value: object) -> object:
    """Drops null fields: a struct column gives each row the fields of all rows, such as arguments of other calls."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _stream_of(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _loaded_chunk(
    source: str,
    unit: str,
    first: int,
    num_bytes: int,
    content: bytes | list[Row],
    problems: tuple[str, ...],
    unread: tuple[str, ...],
) -> LoadedChunk:
    """Unpickles a LoadedChunk."""
    table = content if isinstance(content, list) else pa.ipc.open_stream(content).read_all()
    return LoadedChunk(source, unit, first, num_bytes, table, problems, unread)


@dataclass(frozen=True)
class RowRange:
    """The rows [start, stop) of another chunk, for shards that begin or end inside it."""

    chunk: Chunk
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.chunk.num_bytes

    @property
    def problems(self) -> tuple[str, ...]:
        return self.chunk.problems if self.start == 0 else ()

    def names(self) -> Sequence[str]:
        return self.chunk.names()

    def may_have(self, columns: Collection[str]) -> bool:
        return self.chunk.may_have(columns)

    def table(self, columns: Sequence[str]) -> pa.Table | None:
        table = self.chunk.table(columns)
        return None if table is None else table.slice(self.start, self.stop - self.start)

    def rows(self) -> list[Row]:
        return self.chunk.rows()[self.start : self.stop]

    def read(self) -> list[Row | DataError]:
        return self.chunk.read()[self.start : self.stop]

    def location(self, row: int) -> str:
        return self.chunk.location(self.start + row)

    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class WithoutColumns:
    """Another chunk as if it did not have the columns `ignored`."""

    chunk: Chunk
    ignored: Collection[str]

    @property
    def num_bytes(self) -> int:
        return self.chunk.num_bytes

    @property
    def problems(self) -> tuple[str, ...]:
        return self.chunk.problems

    def names(self) -> Sequence[str]:
        return tuple(name for name in self.chunk.names() if name not in self.ignored)

    def may_have(self, columns: Collection[str]) -> bool:
        return self.chunk.may_have([name for name in columns if name not in self.ignored])

    def table(self, columns: Sequence[str]) -> pa.Table | None:
        return self.chunk.table([name for name in columns if name not in self.ignored])

    def rows(self) -> list[Row]:
        return [self._kept(row) for row in self.chunk.rows()]

    def read(self) -> list[Row | DataError]:
        return [row if isinstance(row, DataError) else self._kept(row) for row in self.chunk.read()]

    def location(self, row: int) -> str:
        return self.chunk.location(row)

    def num_rows(self) -> int:
        return self.chunk.num_rows()

    def _kept(self, row: Row) -> Row:
        return {name: value for name, value in row.items() if name not in self.ignored}


@dataclass(frozen=True)
class SomeRows:
    """Rows of another chunk, already read; `indices` are their numbers in it, `columns` its names."""

    chunk: Chunk
    indices: Sequence[int]
    content: Sequence[Row]
    columns: Sequence[str]

    @property
    def num_bytes(self) -> int:
        return self.chunk.num_bytes

    @property
    def problems(self) -> tuple[str, ...]:
        return ()

    def names(self) -> Sequence[str]:
        return self.columns

    def may_have(self, columns: Collection[str]) -> bool:
        return any(not row.keys().isdisjoint(columns) for row in self.content)

    def table(self, columns: Sequence[str]) -> pa.Table | None:
        return None

    def rows(self) -> list[Row]:
        return [*self.content]

    def read(self) -> list[Row | DataError]:
        return [*self.content]

    def location(self, row: int) -> str:
        return self.chunk.location(self.indices[row])

    def num_rows(self) -> int:
        return len(self.content)


def table_chunks(table: pa.Table, source: str, first: int = 0) -> Iterator[LoadedChunk]:
    """Slices `table` into chunks of about CHUNK_BYTES without copying; `first` is the number of its first row.

    Raises DataError if a column is repeated.
    """
    check_names(table.schema, source)
    step = max(1, int(table.num_rows * CHUNK_BYTES / max(1, table.nbytes)))
    for start in range(0, table.num_rows, step):
        part = table.slice(start, step)
        yield LoadedChunk(source, "row", first + start, part.nbytes, part)


def check_names(schema: pa.Schema, source: str) -> None:
    """Raises DataError if two columns, or two fields of a nested column, have the same name: only one would be read.

    Columns without a name, such as those from commas at the end of CSV lines, cannot be used and may be repeated.
    """
    twice = _repeated([(name, schema.field(index).type) for index, name in enumerate(schema.names)])
    if twice is not None:
        raise DataError(f"{source} has the column {twice!r} twice; remove or rename one of the two")


def _repeated(fields: Sequence[tuple[str, pa.DataType]]) -> str | None:
    seen: set[str] = set()
    for name, kind in fields:
        if name and name in seen:
            return name
        seen.add(name)
        nested = [kind.field(index) for index in range(kind.num_fields)] if pa.types.is_nested(kind) else []
        # The fields of lists and maps have fixed names, which may recur in nested lists and maps.
        inner = [(each.name, each.type) for each in nested]
        is_struct = pa.types.is_struct(kind)
        found = _repeated(inner) if is_struct else next(filter(None, (_repeated([each]) for each in inner)), None)
        if found is not None:
            return f"{name}.{found}" if is_struct else found
    return None


def check_encoding(data: bytes, source: str) -> None:
    """Raises DataError for UTF-16 and UTF-32, by their byte order marks or the zero bytes of the first characters."""
    head = data[:64]
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or 4 * head.count(0) > len(head):
        raise DataError(
            f"{source} is UTF-16 or UTF-32, want UTF-8; convert it, such as with "
            "`iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE`"
        )


def excerpt(text: str) -> str:
    """The beginning of a text, quoted, for an error message."""
    text, limit = text.strip(), 60
    return repr(text if len(text) <= limit else text[:limit] + "...")
