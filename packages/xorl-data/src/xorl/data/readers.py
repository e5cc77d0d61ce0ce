"""Reads local files chunk by chunk, never whole: JSON lines, JSON arrays, text, CSV, Parquet and Arrow."""

from __future__ import annotations

import io
import json
import lzma
import re
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path, PurePath
from typing import Literal, get_args

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from xorl.data.chunks import (
    CHUNK_BYTES,
    JSON_DECODER,
    Chunk,
    DuplicateKeyError,
    LinesChunk,
    LoadedChunk,
    Row,
    check_encoding,
    check_names,
    excerpt,
    table_chunks,
)
from xorl.data.columns import COLUMNS, OPTIONAL_COLUMNS
from xorl.data.errors import DataError

FileType = Literal["json", "csv", "parquet", "arrow", "text"]
FILE_TYPES: tuple[FileType, ...] = get_args(FileType)
SUFFIXES: dict[str, FileType] = {
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".txt": "text",
    ".text": "text",
}
COMPRESSIONS = (".gz", ".bz2", ".zst", ".xz")

# A file with a longer element is probably not a JSON array.
_LONGEST_ELEMENT = 256 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")


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


def _json_chunks(path: Path, selected: Sequence[str] | None) -> Iterator[Chunk]:
    with _decompressed(path) as stream:
        head = b" "
        while head and not head.strip(b" \t\r\n\xef\xbb\xbf"):
            head = stream.read(4096)
    check_encoding(head, str(path))
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
    problems: list[str] = []
    size = first = 0
    for number, (element, num_chars) in enumerate(_array_elements(path)):
        is_row = isinstance(element, dict)
        if size >= CHUNK_BYTES or (rows and not is_row):
            # The rows of a chunk are numbered from its first one, so a chunk ends before an element that is left out.
            yield LoadedChunk(str(path), "element", first, size, rows, tuple(problems))
            rows, problems, size = [], [], 0
        if not is_row and number == 0:  # not a list of rows at all
            raise DataError(_not_an_object(path, number, element, selected))
        if not is_row:
            problems.append(_not_an_object(path, number, element, selected))
            continue
        first = first if rows else number
        rows.append(element)
        size += num_chars
    if rows or problems:
        yield LoadedChunk(str(path), "element", first, size, rows, tuple(problems))


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
        element, end = JSON_DECODER.raw_decode(text, _skip_space(text, start))
    except DuplicateKeyError as error:
        raise DataError(f"{location} {error}") from error
    except json.JSONDecodeError as error:
        return f"{error.msg} near {excerpt(text[max(0, error.pos - 20) : error.pos + 40])}"
    except RecursionError as error:
        return str(error)
    after = _skip_space(text, end)
    if not text.startswith((",", "]"), after):
        return f"want ',' or ']' after {excerpt(text[max(start, end - 40) : end])}"
    return element, end, after


def _skip_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    assert match is not None
    return match.end()


def _csv_chunks(path: Path) -> Iterator[Chunk]:
    if path.stat().st_size == 0:
        return
    with _decompressed(path) as stream:
        check_encoding(stream.read(4096), str(path))
    problems: list[str] = []

    def leave_out(row: pa_csv.InvalidRow) -> str:
        wrong = f"{row.actual_columns} values, want {row.expected_columns}, one for each column"
        problems.append(f"{path}, line {row.number} (the first is 1): has {wrong}: {excerpt(row.text)}")
        return "skip"

    suffixes = [suffix.lower() for suffix in path.suffixes]
    delimiter = "\t" if ".tsv" in suffixes[-2:] else ","
    parse = pa_csv.ParseOptions(newlines_in_values=True, delimiter=delimiter, invalid_row_handler=leave_out)
    read = pa_csv.ReadOptions(use_threads=False, block_size=CHUNK_BYTES)
    with _decompressed(path) as file, pa_csv.open_csv(file, read_options=read, parse_options=parse) as reader:
        check_names(reader.schema, str(path))
        names = reader.schema.names
    problems.clear()
    # All columns are read as strings: Arrow would infer numbers if the first rows of a column have one id each.
    convert = pa_csv.ConvertOptions(column_types={name: pa.string() for name in names}, strings_can_be_null=False)
    first = 0
    with (
        _decompressed(path) as file,
        pa_csv.open_csv(file, read_options=read, parse_options=parse, convert_options=convert) as reader,
    ):
        for batch in reader:
            if batch.num_rows or problems:
                table = pa.Table.from_batches([batch])
                yield LoadedChunk(str(path), "row", first, batch.nbytes, table, tuple(problems))
            first += batch.num_rows + len(problems)
            problems.clear()


def parquet_chunks(
    file: pa_parquet.ParquetFile, source: str, selected: Sequence[str] | None, groups: range
) -> Iterator[LoadedChunk]:
    """The rows of consecutive row groups; `source` names the file in error messages."""
    metadata = file.metadata
    names = file.schema_arrow.names
    check_names(file.schema_arrow, source)
    # If a column is missing, all columns are read, so that the error message can list them.
    complete = all(name in names for name in selected or ("input_ids",))
    read = dict.fromkeys((*(selected or COLUMNS), *OPTIONAL_COLUMNS))
    wanted = [name for name in read if name in names] if complete else None
    schema = file.schema_arrow
    left_out = [] if wanted is None else [name for name in names if name not in wanted]
    unread = tuple(name for name in left_out if not pa.types.is_null(schema.field(name).type))
    num_bytes = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    step = max(1, min(65536, int(metadata.num_rows * CHUNK_BYTES / max(1, num_bytes))))
    first = sum(metadata.row_group(group).num_rows for group in range(groups.start))
    for batch in file.iter_batches(batch_size=step, row_groups=list(groups), columns=wanted):
        yield LoadedChunk(source, "row", first, batch.nbytes, pa.Table.from_batches([batch]), unread=unread)
        first += batch.num_rows


def arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The memory-mapped record batches of an Arrow file, IPC stream or IPC file. DataError for a repeated column."""
    mapped = pa.memory_map(str(path))
    try:
        reader = pa.ipc.open_file(mapped)
    except pa.ArrowInvalid:
        mapped.seek(0)
        stream = pa.ipc.open_stream(mapped)
        check_names(stream.schema, str(path))
        yield from stream
        return
    check_names(reader.schema, str(path))
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)
