"""The files of a stream, divided into independently readable blocks without reading the rows.

Files of lines are divided by bytes, Parquet files by row groups. A file that can only be read from the start is one
block.
"""

from __future__ import annotations

import json
import os
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pa_parquet

from xorl.data.arguments import check_at_least, check_fields, checked, convert_fields_
from xorl.data.choose import choose_format, limits_of
from xorl.data.chunks import Chunk
from xorl.data.entry import DUMMY, DatasetEntry, check_entry
from xorl.data.errors import DataError
from xorl.data.formats import Format
from xorl.data.hashing import digest
from xorl.data.invariants import Limits, check_extras, check_special_ids, check_tokenizer
from xorl.data.lock import exclusive
from xorl.data.mixture import Share, check_repetitions, check_shares
from xorl.data.readers import COMPRESSIONS, FileType
from xorl.data.receipt import Findings
from xorl.data.remote import is_url
from xorl.data.sources import LocatedFile, locate_files
from xorl.data.store import make_prepared_folder
from xorl.data.stream.reading import StreamFile, block_chunks, open_file, starts_with_array

# The unit of shuffling and of reading: small enough to mix well, large enough to read at full speed.
BLOCK_BYTES = 1 << 20
_PARALLEL = 16


Result = TypeVar("Result")


@dataclass(frozen=True)
class StreamEntry:
    """The files and the format of one entry of the configuration."""

    name: str
    option: str
    files: tuple[StreamFile, ...]
    format: Format
    share: Share
    limits: Limits

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def num_blocks(self) -> int:
        return sum(file.num_blocks for file in self.files)


@dataclass(frozen=True)
class StreamOptions:
    """The options of a stream. `seed` determines the order of blocks and rows; without `shuffle`, the files do.

    `bin_len` is the number of tokens per bin. `vocab_size`, `tokenizer_folder` and `model_special_ids` are those of
    PrepareOptions.
    """

    bin_len: int
    vocab_size: int | None = None
    tokenizer_folder: Path | None = None
    model_special_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        convert_fields_(self)
        check_fields(self)
        check_special_ids(self.model_special_ids)
        check_at_least(1, bin_len=self.bin_len, vocab_size=self.vocab_size)


@dataclass(frozen=True)
class Stream:
    """All entries of a streamed dataset. Cheap to pickle: workers receive it and open the files themselves.

    `findings` are from the first samples of each entry (sample.check_first_samples), if these were checked.
    """

    entries: tuple[StreamEntry, ...]
    options: StreamOptions
    findings: tuple[Findings, ...] = ()

    @property
    def extra_names(self) -> tuple[str, ...]:
        return self.entries[0].format.extras

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def fingerprint(self) -> str:
        """Identifies formats, shares and content. The content is identified by file sizes and versions, not read."""
        files = [[[file.size, file.version, file.num_blocks] for file in entry.files] for entry in self.entries]
        formats = [entry.format.fingerprint() for entry in self.entries]
        shares = [[entry.share.weight, entry.share.num_epochs] for entry in self.entries]
        return digest("stream", files, formats, shares, self.options.bin_len)


class BlockTable:
    """Finds the blocks of one entry by number."""

    def __init__(self, entry: StreamEntry) -> None:
        self._files = entry.files
        self._starts = [0, *accumulate(file.num_blocks for file in entry.files)]

    def __getitem__(self, block: int) -> tuple[StreamFile, int]:
        """The file of a block, and the block's number within the file."""
        file = bisect_right(self._starts, block) - 1
        return self._files[file], block - self._starts[file]


@checked
def open_stream(
    entries: Sequence[DatasetEntry],
    options: StreamOptions,
    *,
    index_path: Path | str,
    option: str = "entries",
    token: str | bool | None = None,
) -> Stream:
    """Opens the stream of `entries`. The row-group boundaries of Parquet files are cached in the folder `index_path`.

    Reads only names, sizes, versions and the footers of Parquet files, but no rows, except for type auto. Raises
    DataError if a file does not exist or cannot be streamed.
    """
    if not entries:
        raise DataError(f"{option} is empty; name at least one dataset")
    for index, entry in enumerate(entries):
        check_entry(entry, f"{option}[{index}]", options.bin_len)
    shares = [Share(entry.weight, entry.num_epochs) for entry in entries]
    check_shares(shares, option)
    folder = Path(index_path)
    opened = [_open_entry(entry, options, f"{option}[{index}]", folder, token) for index, entry in enumerate(entries)]
    check_repetitions([entry.num_blocks for entry in opened], shares, option, "blocks of about 1 MiB")
    check_extras([(entry.option, entry.format.extras) for entry in opened])
    return Stream(tuple(opened), options)


def _open_entry(
    entry: DatasetEntry, options: StreamOptions, option: str, index_path: Path, token: str | bool | None
) -> StreamEntry:
    if entry.path == DUMMY:
        raise DataError(f"{option}.path: dummy cannot be streamed; call prepare() instead")
    if entry.shards is not None:
        raise DataError(
            f"{option}.shards: a stream cannot be divided into shards, because its rows are not counted; remove shards "
            "and shards_idx"
        )
    located, ds_type = locate_files(entry, option=option, token=token)
    files = tuple(_indexed(located, ds_type, index_path, option))
    if not any(file.num_blocks for file in files):
        raise DataError(f"{option}: {entry.path} is empty: all its files are empty")
    fmt = choose_format(
        entry,
        bin_len=options.bin_len,
        vocab_size=options.vocab_size,
        option=option,
        source=_FirstBlocks(files, option),
        tokenizer_folder=options.tokenizer_folder,
    )
    if fmt.uses_current_date:
        raise DataError(
            f"{option}.chat_template: the template writes the current date, so the data would change when a run is "
            f"resumed on another day; set {option}.chat_template_kwargs: {{strftime_now: 2026-01-31}} to fix the date"
        )
    check_tokenizer(fmt, options.model_special_ids, entry.path)
    return StreamEntry(entry.path, option, files, fmt, Share(entry.weight, entry.num_epochs), limits_of(entry))


@dataclass(frozen=True)
class _FirstBlocks:
    """The rows of a stream's files, for recognising their type."""

    files: Sequence[StreamFile]
    option: str

    def chunks(self, selected: Sequence[str] | None) -> Iterator[Chunk]:
        for file in self.files:
            for block in range(file.num_blocks):
                yield from block_chunks(file, block, selected, self.option)


def _indexed(located: Sequence[LocatedFile], ds_type: FileType, index_path: Path, option: str) -> Sequence[StreamFile]:
    """Divides the files into blocks. One process reads the footers of Parquet files and writes them to the index."""
    if ds_type != "parquet":
        return _in_parallel(partial(_divide_by_bytes, ds_type=ds_type, option=option), located)
    key = digest("index", [[file.path, file.size, file.version] for file in located], BLOCK_BYTES)
    path = index_path / f"{key}.json"
    if not path.is_file():
        make_prepared_folder(index_path)
        with exclusive(index_path / f".{key}.lock", f"stream index={located[0].path}"):
            if not path.is_file():
                groups = _in_parallel(partial(_row_groups, option=option), located)
                temporary = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
                temporary.write_text(json.dumps(groups))
                os.replace(temporary, path)
    groups = [tuple(starts) for starts in json.loads(path.read_text())]
    return [
        StreamFile(file.path, file.size, file.version, ds_type, len(starts) - 1, groups=starts)
        for file, starts in zip(located, groups, strict=True)
    ]


def _in_parallel(function: Callable[[LocatedFile], Result], files: Sequence[LocatedFile]) -> list[Result]:
    with ThreadPoolExecutor(_PARALLEL) as pool:
        return list(pool.map(function, files))


def _divide_by_bytes(file: LocatedFile, ds_type: FileType, option: str) -> StreamFile:
    name = PurePosixPath(file.path.partition("?")[0]) if is_url(file.path) else PurePosixPath(file.path)
    has_lines = ds_type in ("json", "text") and name.suffix.lower() not in COMPRESSIONS
    # To save requests, remote files are only probed if their suffix is .json, which is used for arrays and for lines.
    if has_lines and ds_type == "json" and (name.suffix.lower() == ".json" or not is_url(file.path)):
        with open_file(file.path, file.size, file.version, option) as opened:
            has_lines = not starts_with_array(opened)
    if not has_lines:
        return StreamFile(file.path, file.size, file.version, ds_type, 1 if file.size else 0)
    num_blocks = -(-file.size // BLOCK_BYTES)
    return StreamFile(file.path, file.size, file.version, ds_type, num_blocks, block_bytes=BLOCK_BYTES)


def _row_groups(file: LocatedFile, option: str) -> list[int]:
    """The first row group of each block of about BLOCK_BYTES, and the number of row groups."""
    try:
        with (
            open_file(file.path, file.size, file.version, option) as opened,
            pa_parquet.ParquetFile(opened) as table,
        ):
            metadata = table.metadata
    except pa.ArrowException as error:
        raise DataError(f"{option}.path: {file.path}: cannot be read as parquet: {error}") from error
    starts, num_bytes = [0], 0
    for group in range(metadata.num_row_groups):
        num_bytes += metadata.row_group(group).total_byte_size
        if num_bytes >= BLOCK_BYTES or group == metadata.num_row_groups - 1:
            starts.append(group + 1)
            num_bytes = 0
    return starts
