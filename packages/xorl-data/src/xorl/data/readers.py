"""Reads local files chunk by chunk, never whole: JSON lines, JSON arrays, text, CSV, Parquet and Arrow.

A chunk offers its rows in two forms: `table` is fast, but None for irregular data; `rows` reads all valid data, and
raises a DataError with file and line for the rest. The formats interpret the rows.
"""

from __future__ import annotations

import io
import json
import lzma
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePath
from typing import Literal, Protocol, get_args

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pa_parquet

from xorl.data.errors import DataError

FileType = Literal["json", "csv", "parquet", "arrow", "text"]
FILE_TYPES: tuple[FileType, ...] = get_args(FileType)
SUFFIXES: dict[str, FileType] = {
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".txt": "text",
    ".text": "text",
}
COMPRESSIONS = (".gz", ".bz2", ".zst", ".xz")
Row = dict[str, object]

# The columns of tokenized rows that are read if no columns are selected.
COLUMNS = ("input_ids", "labels", "attention_mask")

# Large enough to make the fixed cost per chunk negligible, small enough to hold several chunks per process in memory.
CHUNK_BYTES = 8 << 20
# A file with a longer element is probably not a JSON array.
_LONGEST_ELEMENT = 256 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")


class _DuplicateKeyError(ValueError):
    """A JSON object has a key twice."""


def _unique_keys(pairs: list[tuple[str, object]]) -> Row:
    """Converts an object's pairs; Python's parser would keep the last of two values."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise _DuplicateKeyError(f"has the key {twice!r} twice in one object; remove one of the two")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)


class Chunk(Protocol):
    """Consecutive rows of one source."""

    @property
    def num_bytes(self) -> int: ...

    def table(self, columns: Sequence[str]) -> pa.Table | None:
        """Those of `columns` that exist; None if only `rows` can read the chunk."""
        ...

    def rows(self) -> list[Row]: ...

    def location(self, row: int) -> str:
        """The location of the chunk's row number `row`, for error messages: 'train.jsonl, line 12'."""
        ...

    def num_rows(self) -> int: ...


def file_type(path: PurePath) -> FileType | None:
    """The type for a file's suffix, ignoring a compression suffix; None if unknown."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        kind = SUFFIXES.get(suffixes[-2]) if len(suffixes) > 1 else None
        return kind if kind in ("json", "csv", "text") else None
    return SUFFIXES.get(suffixes[-1]) if suffixes else None


def read_chunks(path: Path, ds_type: FileType, selected: Sequence[str] | None = None) -> Iterator[Chunk]:
    """Yields the chunks of one file in order.

    `selected` are the columns that will be used (None: COLUMNS); file formats with columns skip the others.
    """
    try:
        match ds_type:
            case "json":
                yield from _json_chunks(path, selected)
            case "text":
                yield from _line_chunks(path, as_json=False)
            case "csv":
                yield from _csv_chunks(path)
            case "parquet":
                with pa_parquet.ParquetFile(path) as file:
                    yield from parquet_chunks(file, str(path), selected, range(file.metadata.num_row_groups))
            case "arrow":
                first = 0
                for batch in arrow_batches(path):
                    yield from table_chunks(pa.Table.from_batches([batch]), str(path), first)
                    first += batch.num_rows
    except (pa.ArrowException, UnicodeDecodeError, OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be read as {ds_type}: {error}") from error


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

    def rows(self) -> list[Row]:
        return [self._row(line, index) for index, line in enumerate(self._lines(self._bytes()))]

    def location(self, row: int) -> str:
        lines = (number for number, line in enumerate(self._bytes().split(b"\n")) if line.strip())
        offset = next(number for index, number in enumerate(lines) if index == row)
        if self.url is not None and self.first_line is None:
            return f"{self.url}, line {offset + 1} after byte {self.start}"
        return f"{self.url or self.path}, line {self._first_line() + offset}"

    def num_rows(self) -> int:
        return self._count_lines(self._bytes())

    def _bytes(self) -> bytes:
        if self.data is not None:
            data = self.data
        else:
            with self.path.open("rb") as file:
                file.seek(self.start)
                data = file.read(self.stop - self.start)
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
        # Counted only for an error message: there may be many gigabytes before this chunk.
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
            row: object = _DECODER.decode(text) if self.as_json else {"text": text.removesuffix("\r")}
        except UnicodeDecodeError as error:
            raise DataError(f"{self.location(index)} is not UTF-8: {error.reason} at byte {error.start}") from error
        except (json.JSONDecodeError, RecursionError) as error:
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise DataError(f"{self.location(index)} is not JSON: {reason}: {_excerpt(text)}") from error
        except _DuplicateKeyError as error:
            raise DataError(f"{self.location(index)} {error}: {_excerpt(text)}") from error
        if not isinstance(row, dict):
            raise DataError(f"{self.location(index)} is {type(row).__name__}, want one JSON object: {_excerpt(text)}")
        return {**row}


@dataclass(frozen=True)
class LoadedChunk:
    """Rows already in memory (or memory-mapped), as an Arrow table or as plain rows."""

    source: str
    unit: str
    first: int
    num_bytes: int
    content: pa.Table | list[Row]

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

    def location(self, row: int) -> str:
        return f"{self.source}, {self.unit} {self.first + row} (the first is 0)"

    def num_rows(self) -> int:
        return len(self.content)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # Pickling a slice of an Arrow array pickles the whole array; the stream format writes only the slice.
        content = self.content if isinstance(self.content, list) else _stream_of(self.content)
        return _loaded_chunk, (self.source, self.unit, self.first, self.num_bytes, content)


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


def _loaded_chunk(source: str, unit: str, first: int, num_bytes: int, content: bytes | list[Row]) -> LoadedChunk:
    """Unpickles a LoadedChunk."""
    table = content if isinstance(content, list) else pa.ipc.open_stream(content).read_all()
    return LoadedChunk(source, unit, first, num_bytes, table)


@dataclass(frozen=True)
class RowRange:
    """The rows [start, stop) of another chunk, for shards that begin or end inside it."""

    chunk: Chunk
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.chunk.num_bytes

    def table(self, columns: Sequence[str]) -> pa.Table | None:
        table = self.chunk.table(columns)
        return None if table is None else table.slice(self.start, self.stop - self.start)

    def rows(self) -> list[Row]:
        return self.chunk.rows()[self.start : self.stop]

    def location(self, row: int) -> str:
        return self.chunk.location(self.start + row)

    def num_rows(self) -> int:
        return self.stop - self.start


def table_chunks(table: pa.Table, source: str, first: int = 0) -> Iterator[LoadedChunk]:
    """Slices `table` into chunks of about CHUNK_BYTES without copying; `first` is the number of its first row."""
    step = max(1, int(table.num_rows * CHUNK_BYTES / max(1, table.nbytes)))
    for start in range(0, table.num_rows, step):
        part = table.slice(start, step)
        yield LoadedChunk(source, "row", first + start, part.nbytes, part)


def _json_chunks(path: Path, selected: Sequence[str] | None) -> Iterator[Chunk]:
    with _decompressed(path) as stream:
        head = b" "
        while head and not head.strip(b" \t\r\n\xef\xbb\xbf"):
            head = stream.read(4096)
    if head.lstrip(b" \t\r\n\xef\xbb\xbf").startswith(b"["):
        yield from _array_chunks(path, selected)
    else:
        yield from _line_chunks(path, as_json=True)


def _decompressed(path: Path) -> pa.NativeFile:
    """The content of a file, decompressed by its suffix."""
    if path.suffix.lower() == ".xz":  # not supported by Arrow
        return pa.PythonFile(lzma.open(path), mode="r")
    return pa.input_stream(str(path))


def _line_chunks(path: Path, *, as_json: bool) -> Iterator[Chunk]:
    if path.suffix.lower() in COMPRESSIONS:
        with _decompressed(path) as stream:
            yield from line_chunks_of(stream, path, as_json=as_json)
        return
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 0
        while start < size:
            file.seek(min(start + CHUNK_BYTES, size))
            file.readline()
            stop = file.tell()
            yield LinesChunk(path, as_json, start, stop)
            start = stop


def line_chunks_of(stream: pa.NativeFile, path: Path, *, as_json: bool, url: str | None = None) -> Iterator[LinesChunk]:
    """The lines of a file that can only be read from the start; `path` or `url` names it in error messages."""
    start, line, rest = 0, 1, b""
    while True:
        block = stream.read(CHUNK_BYTES)
        data, newline, tail = (rest + block).rpartition(b"\n")
        if not block:
            data, tail = rest, b""
        elif not newline:
            rest = tail
            continue
        data, rest = data + newline, tail
        if data:
            yield LinesChunk(path, as_json, start, start + len(data), data, line, url)
        start, line = start + len(data), line + data.count(b"\n")
        if not block:
            return


def _array_chunks(path: Path, selected: Sequence[str] | None) -> Iterator[Chunk]:
    rows: list[Row] = []
    size = first = 0
    for number, (element, num_chars) in enumerate(_array_elements(path)):
        if not isinstance(element, dict):
            raise DataError(_not_an_object(path, number, element, selected))
        rows.append(element)
        size += num_chars
        if size >= CHUNK_BYTES:
            yield LoadedChunk(str(path), "element", first, size, rows)
            rows, size, first = [], 0, number + 1
    if rows:
        yield LoadedChunk(str(path), "element", first, size, rows)


def _not_an_object(path: Path, number: int, element: object, selected: Sequence[str] | None) -> str:
    """The error for an array element that is not an object; in a JSON lines file, line 1 is probably a list."""
    is_json_lines = ".jsonl" in path.suffixes or ".ndjson" in path.suffixes
    location = "line 1 is a list, whose element" if is_json_lines else "element"
    wanted = f"its columns ({', '.join(selected)})" if selected else "input_ids"
    hint = "" if selected else "; to read one list of ids per line, set ds_type: text"
    row = "one object per line" if is_json_lines else "an object"
    return f"{path}, {location} {number} (the first is 0) is {type(element).__name__}, want {row} with {wanted}{hint}"


def _array_elements(path: Path) -> Iterator[tuple[object, int]]:
    """Yields the elements of a top-level JSON array and their lengths in characters, without loading the whole file."""
    # Invalid UTF-8 is read as lone surrogates, so that the error can name the element with them.
    with _decompressed(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape") as file:
        text = file.read(CHUNK_BYTES)
        start = _skip_space(text, text.index("[") + 1)
        if text.startswith("]", start):
            return
        for number in count():
            while isinstance(found := _decode_element(text, start, f"{path}, element {number} (the first is 0)"), str):
                # The element may continue beyond the text read so far, so it is an error only at the end of the file
                # or at our limit.
                text, start = text[start:], 0
                block = file.read(max(CHUNK_BYTES, len(text))) if len(text) < _LONGEST_ELEMENT else ""
                if not block:
                    raise DataError(f"{path}, element {number} (the first is 0) is not JSON: {found}")
                text += block
            element, end, after = found
            if _NOT_UTF8.search(text, start, end):
                raise DataError(f"{path}, element {number} (the first is 0) is not UTF-8")
            yield element, end - start
            start = after + 1
            if text[after] == "]":
                if _skip_space(text, start) < len(text) or file.read(1):
                    raise DataError(
                        f"{path}: there is text after the end of the JSON array; want one array, or one object per line"
                    )
                return


def _decode_element(text: str, start: int, location: str) -> tuple[object, int, int] | str:
    """Returns (the element at `start`, its end, the offset of the comma or bracket after it), or an error message.

    The message may be due to a text that ends too early; raises DataError for an error that more text cannot correct.
    """
    try:
        element, end = _DECODER.raw_decode(text, _skip_space(text, start))
    except _DuplicateKeyError as error:
        raise DataError(f"{location} {error}") from error
    except json.JSONDecodeError as error:
        return f"{error.msg} near {_excerpt(text[max(0, error.pos - 20) : error.pos + 40])}"
    except RecursionError as error:
        return str(error)
    after = _skip_space(text, end)
    if not text.startswith((",", "]"), after):
        return f"want ',' or ']' after {_excerpt(text[max(start, end - 40) : end])}"
    return element, end, after


def _skip_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    assert match is not None
    return match.end()


def _csv_chunks(path: Path) -> Iterator[Chunk]:
    parse = pa_csv.ParseOptions(newlines_in_values=True)
    read = pa_csv.ReadOptions(use_threads=False, block_size=CHUNK_BYTES)
    if path.stat().st_size == 0:
        return
    with _decompressed(path) as file, pa_csv.open_csv(file, read_options=read, parse_options=parse) as reader:
        names = reader.schema.names
    # All columns are read as strings: Arrow would infer numbers if the first rows of a column have one id each.
    convert = pa_csv.ConvertOptions(column_types={name: pa.string() for name in names}, strings_can_be_null=False)
    first = 0
    with (
        _decompressed(path) as file,
        pa_csv.open_csv(file, read_options=read, parse_options=parse, convert_options=convert) as reader,
    ):
        for batch in reader:
            if batch.num_rows:
                yield LoadedChunk(str(path), "row", first, batch.nbytes, pa.Table.from_batches([batch]))
            first += batch.num_rows


def parquet_chunks(
    file: pa_parquet.ParquetFile, source: str, selected: Sequence[str] | None, groups: range
) -> Iterator[LoadedChunk]:
    """The rows of consecutive row groups; `source` names the file in error messages."""
    metadata = file.metadata
    names = file.schema_arrow.names
    # If a column is missing, all columns are read, so that the error message can list them.
    complete = all(name in names for name in selected or ("input_ids",))
    wanted = [name for name in selected or COLUMNS if name in names] if complete else None
    num_bytes = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    step = max(1, min(65536, int(metadata.num_rows * CHUNK_BYTES / max(1, num_bytes))))
    first = sum(metadata.row_group(group).num_rows for group in range(groups.start))
    for batch in file.iter_batches(batch_size=step, row_groups=list(groups), columns=wanted):
        yield LoadedChunk(source, "row", first, batch.nbytes, pa.Table.from_batches([batch]))
        first += batch.num_rows


def arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The memory-mapped record batches of an Arrow file, IPC stream or IPC file."""
    mapped = pa.memory_map(str(path))
    try:
        reader = pa.ipc.open_file(mapped)
    except pa.ArrowInvalid:
        mapped.seek(0)
        yield from pa.ipc.open_stream(mapped)
        return
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


def _excerpt(text: str, limit: int = 60) -> str:
    text = text.strip()
    return repr(text if len(text) <= limit else text[:limit] + "...")
