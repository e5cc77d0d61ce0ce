"""Turns a dataset entry (files, folders, URLs, saved datasets, Hub ids) into a Source of samples.

A source identifies its content by a hash and yields chunks of rows; the formats interpret the rows.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import Protocol

from xorl.data.chunks import Chunk, RowRange
from xorl.data.declared import CARDS, declared_files, declared_names, declares_files, local_cards
from xorl.data.downloads import Download, fetch_all, with_retries
from xorl.data.entry import DatasetEntry
from xorl.data.errors import DataError
from xorl.data.hashing import JSON, hash_files
from xorl.data.readers import COMPRESSIONS, FILE_TYPES, SUFFIXES, FileType, file_type, read_chunks
from xorl.data.remote import RemoteFile, Storage, is_url, storage_of
from xorl.data.saved import is_saved_folder, saved_files

# The folder for downloads, inside the folder of prepared datasets.
DOWNLOADS = "downloads"
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Source(Protocol):
    """The raw samples of one entry."""

    @property
    def name(self) -> str: ...

    @property
    def num_bytes(self) -> int:
        """Approximate size in bytes, for progress messages and to decide whether to use several processes."""
        ...

    @property
    def parallel(self) -> bool:
        """Whether to encode in several processes: chunks are cheap to send and expensive to encode."""
        ...

    def identity(self) -> JSON:
        """Identifies the samples by their content, not by their location. Reads all data."""
        ...

    def chunks(self, selected: Sequence[str] | None) -> Iterator[Chunk]: ...


def load_source(
    entry: DatasetEntry,
    *,
    option: str = "entries[0]",
    token: str | bool | None = None,
    downloads: Path = Path("last_prepared_dataset") / DOWNLOADS,
) -> Source:
    """Returns the source that `entry` names; `option` is the entry's path in the configuration, for error messages.

    `token` is passed to `datasets` for private Hub datasets. Remote files are downloaded into the folder `downloads`.
    Raises DataError if the data does not exist or cannot be read, DataFailure if the network fails.
    """
    path = _local_path(entry, option)
    if path is None:
        source: Source = _remote_source(entry, option, downloads)
    else:
        source = _local_source(path, entry, option) if path.exists() else _hub_source(entry, option, token)
    if entry.shards is None:
        return source
    assert entry.shards_idx is not None, "check_entry requires both"
    return ShardedSource(source, entry.shards, entry.shards_idx)


@dataclass(frozen=True)
class LocatedFile:
    """A file to read in place, without a download: a local path or a URL. `version` changes with the content."""

    path: str
    size: int
    version: str


def locate_files(entry: DatasetEntry, *, option: str, token: str | bool | None) -> tuple[list[LocatedFile], FileType]:
    """Returns the files that `entry` names, in order, and their type, without reading or downloading them."""
    path = _local_path(entry, option)
    if path is not None and path.exists():
        source = _local_source(path, entry, option)
        stats = [(file.absolute(), file.stat()) for file in source.files]
        return [LocatedFile(str(file), stat.st_size, str(stat.st_mtime_ns)) for file, stat in stats], source.ds_type
    if path is None:
        storage, files = remote_files(entry, option)
    else:
        urls = _hub_urls(entry, option, token)
        storage = storage_of(urls[0], f"{option}.path", token)
        found = [with_retries(partial(storage.stat, url), url) for url in urls]
        files = [file for file in found if file is not None]
    unsized = [file.url for file in files if file.size is None]
    if unsized:
        raise DataError(f"{option}.path: the server does not report the size of {unsized[0]}; call prepare() instead")
    ds_type = type_of([PurePosixPath(file.name) for file in files], entry, option)
    return [LocatedFile(file.url, file.size or 0, file.version or "") for file in files], ds_type


def _local_path(entry: DatasetEntry, option: str) -> Path | None:
    """The local path of an entry, or None for URLs. A missing path may be the id of a Hub dataset."""
    if has_urls(entry):
        return None
    path = Path(entry.path).expanduser()
    looks_local = entry.path.startswith((".", "~")) or file_type(path) is not None
    if not path.exists() and (looks_local or _HUB_ID.fullmatch(entry.path) is None):
        message = f"{option}.path: {entry.path} does not exist (looked at {path.absolute()})"
        if glob.has_magic(entry.path):
            raise DataError(f"{message}. Set path to the folder, {option}.data_files to the pattern, and ds_type")
        raise DataError(f"{message}, and it is not a Hub dataset id of the form org/name")
    return path


@dataclass(frozen=True)
class FileSource:
    """Local files of one type, in order."""

    name: str
    files: tuple[Path, ...]
    ds_type: FileType

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    @property
    def parallel(self) -> bool:
        return self.ds_type in ("json", "text")

    def identity(self) -> JSON:
        return {"ds_type": self.ds_type, "files": hash_files(self.files)}

    def chunks(self, selected: Sequence[str] | None) -> Iterator[Chunk]:
        for path in self.files:
            yield from read_chunks(path, self.ds_type, selected)


@dataclass(frozen=True)
class DownloadedSource(FileSource):
    """The local copies of remote files."""

    downloads: tuple[Download, ...]

    def identity(self) -> JSON:
        hashes = hash_files(self.files)
        for download, content in zip(self.downloads, hashes, strict=True):
            if content != download.content:
                raise DataError(
                    f"{download.path} was modified after its download from {download.url}; remove the folder "
                    f"{download.path.parent} to download it again, or set path to your own copy"
                )
        return {"ds_type": self.ds_type, "files": hashes}


@dataclass(frozen=True)
class ShardedSource:
    """Shard `index` of `num` consecutive shards of another source; the first ones get the remaining rows."""

    source: Source
    num: int
    index: int
    # The number of rows of `source`, if known.
    num_rows: int | None = None

    @property
    def name(self) -> str:
        return f"{self.source.name}[{self.index}/{self.num}]"

    @property
    def num_bytes(self) -> int:
        return self.source.num_bytes // self.num

    @property
    def parallel(self) -> bool:
        return self.source.parallel

    def identity(self) -> JSON:
        return {"source": self.source.identity(), "shards": self.num, "shards_idx": self.index}

    def chunks(self, selected: Sequence[str] | None) -> Iterator[Chunk]:
        total = count_rows(self.source, selected) if self.num_rows is None else self.num_rows
        start, stop = shard_range(total, self.num, self.index)
        first = 0
        for chunk in self.source.chunks(selected):
            size = chunk.num_rows()
            low, high = max(start - first, 0), min(stop - first, size)
            if low < high:
                yield RowRange(chunk, low, high)
            first += size
            if first >= stop:
                return


def count_rows(source: Source, selected: Sequence[str] | None) -> int:
    """The number of rows of a source. Reads all data."""
    return sum(chunk.num_rows() for chunk in source.chunks(selected))


def shard_range(total: int, num: int, index: int) -> tuple[int, int]:
    """The rows [start, stop) of shard `index` of `num` consecutive shards of `total` rows."""
    size, rest = divmod(total, num)
    start = size * index + min(index, rest)
    return start, start + size + (index < rest)


def _check_no_hub_options(entry: DatasetEntry, option: str) -> None:
    _check_no_revision(entry, option)
    if entry.name is not None:
        raise DataError(
            f"{option}.name: {entry.name!r} applies only to Hub datasets, and to folders whose README.md declares "
            f"configs, not to {entry.path}{' with data_files' if entry.data_files is not None else ''}; remove it"
        )


def _check_no_revision(entry: DatasetEntry, option: str) -> None:
    if entry.revision is not None:
        raise DataError(
            f"{option}.revision: {entry.revision!r} applies only to Hub datasets, not to {entry.path}; remove it"
        )


def _local_source(path: Path, entry: DatasetEntry, option: str) -> FileSource:
    if entry.data_files is None and path.is_dir() and declares_files(local_cards(path)):
        _check_no_revision(entry, option)
        files = declared_files(path, entry, option)
        return FileSource(entry.path, tuple(files), type_of(files, entry, option))
    _check_no_hub_options(entry, option)
    if entry.data_files is None and path.is_dir() and is_saved_folder(path):
        return FileSource(entry.path, tuple(saved_files(path, entry.split, option=option)), "arrow")
    if entry.data_files is not None:
        _check_no_split(entry, option)
        files = _named_files(path, entry.data_files, option)
    elif path.is_dir():
        below = sorted(file for file in path.rglob("*") if file.is_file())
        names = data_files_among([file.relative_to(path).as_posix() for file in below], entry, option)
        files = [path / name for name in names]
    else:
        _check_no_split(entry, option)
        files = [path]
    return FileSource(entry.path, tuple(files), type_of(files, entry, option))


def _check_no_split(entry: DatasetEntry, option: str) -> None:
    if entry.split not in (None, "train"):
        raise DataError(
            f"{option}.split: files have no split {entry.split!r}; list the files of that split in data_files, "
            "or select a part with shards and shards_idx"
        )


def _named_files(folder: Path, data_files: str | Sequence[str], option: str) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"{option}.data_files: path is the file {folder}; set path to the folder, or remove data_files")
    files: list[Path] = []
    for pattern in [data_files] if isinstance(data_files, str) else data_files:
        full = str(folder / Path(pattern).expanduser())
        if Path(full).is_file():
            files.append(Path(full))
            continue
        matches = sorted(Path(match) for match in glob.glob(full, recursive=True) if Path(match).is_file())
        if not matches:
            raise DataError(f"{option}.data_files: {pattern!r} matches no file in {folder.absolute()}")
        files.extend(matches)
    return [*dict.fromkeys(files)]  # a file that several patterns match is read once


def data_files_among(names: Sequence[str], entry: DatasetEntry, option: str) -> list[str]:
    """Selects the entry's data files from the relative `names` of all files below a folder.

    If the names contain split names, only the files of the entry's split are selected.
    """
    paths = [PurePosixPath(name) for name in names]
    below = [path for path in paths if not any(part[0] in "._" for part in path.parts)]
    files = [path for path in below if (kind := file_type(path)) is not None and entry.ds_type in (None, kind)]
    if not files:
        wanted = f"{entry.ds_type} files" if entry.ds_type else f"files ending in {', '.join(SUFFIXES)}"
        raise DataError(f"{option}.path: the folder {entry.path} has no {wanted} ({len(below)} other files)")
    splits: dict[str, list[PurePosixPath]] = {}
    for path in files:
        splits.setdefault(_split_of(path), []).append(path)
    if set(splits) == {""}:
        _check_no_split(entry, option)
        return list(map(str, files))
    wanted = entry.split or "train"
    if wanted not in splits:
        known = ", ".join(name for name in splits if name)
        raise DataError(f"{option}.split: {wanted!r} not found; the file names in {entry.path} name the splits {known}")
    unclear = next((path for path in files if wanted in (named := _splits_named(path)) and len(named) > 1), None)
    if unclear is not None:
        raise DataError(
            f"{option}.path: {unclear} in {entry.path} names two splits ({' and '.join(_splits_named(unclear))}); list "
            f"the files in {option}.data_files"
        )
    if "" in splits:
        raise DataError(
            f"{option}.path: some file names in {entry.path} name a split ({splits[wanted][0].name}) and some do not "
            f"({splits[''][0].name}); list the files in {option}.data_files"
        )
    return list(map(str, splits[wanted]))


def _split_of(path: PurePosixPath) -> str:
    return next(filter(None, map(_split_in, reversed(path.parts))), "")


def _splits_named(path: PurePosixPath) -> list[str]:
    """The splits that the file and its folders name; more than one if they disagree."""
    return [*dict.fromkeys(filter(None, map(_split_in, path.parts)))]


def _split_in(part: str) -> str:
    words = re.split(r"[^a-z]+", part.lower())
    return next((name for name, keywords in _SPLIT_WORDS.items() if any(word in keywords for word in words)), "")


def type_of(files: Sequence[PurePath], entry: DatasetEntry, option: str) -> FileType:
    """The type of the entry's files: the option `ds_type`, or the type that all file names agree on."""
    if entry.ds_type is not None:
        return entry.ds_type
    kinds: dict[FileType | None, PurePath] = {file_type(path): path for path in files}
    if None in kinds:
        raise DataError(
            f"{option}.path: the name of {kinds[None]} does not show its type; set {option}.ds_type to one of "
            f"{', '.join(FILE_TYPES)} (known suffixes: {', '.join(SUFFIXES)}, also with {', '.join(COMPRESSIONS)})"
        )
    if len(kinds) > 1:
        raise DataError(f"{option}.path: {entry.path} mixes {', '.join(sorted(map(str, kinds)))}; set {option}.ds_type")
    return next(kind for kind in kinds if kind is not None)


def has_urls(entry: DatasetEntry) -> bool:
    """Whether any of the entry's files is remote. Whether they can be read together is checked later."""
    return is_url(entry.path) or any(is_url(name) for name in _names(entry))


def remote_files(entry: DatasetEntry, option: str) -> tuple[Storage, list[RemoteFile]]:
    """The storage of an entry's remote files, and the files in order."""
    if entry.data_files is not None:
        _check_no_hub_options(entry, option)
    if entry.data_files is None:
        storage = storage_of(entry.path, f"{option}.path")
        return storage, _files_at(storage, entry, option)
    _check_no_split(entry, option)
    urls = [name if is_url(name) else f"{entry.path.rstrip('/')}/{name}" for name in _names(entry)]
    strays = [url for url in urls if not is_url(url)]
    if strays or len({url.split("://")[0] for url in urls}) > 1:
        raise DataError(
            f"{option}.data_files: {strays or urls} must be URLs of one scheme; write a separate entry for each scheme"
        )
    storage = storage_of(urls[0], f"{option}.data_files")
    files: list[RemoteFile] = []
    for url in urls:
        found = with_retries(partial(storage.stat, url), url)
        matches = [found] if found is not None else with_retries(partial(storage.find, url), url)
        if not matches:
            raise DataError(f"{option}.data_files: {url} matches no file")
        files.extend(matches)
    return storage, files


def _files_at(storage: Storage, entry: DatasetEntry, option: str) -> list[RemoteFile]:
    url = entry.path
    single = with_retries(partial(storage.stat, url), url)
    found = [single] if single is not None else with_retries(partial(storage.find, url), url)
    if not found:
        raise DataError(f"{option}.path: {url} does not exist, or is an empty folder")
    if single is not None or any(character in url for character in "*?["):
        _check_no_hub_options(entry, option)
        _check_no_split(entry, option)
        return found
    root = f"{url.rstrip('/')}/"
    by_name = {file.url.removeprefix(root): file for file in found}
    cards = {name: _read_text(storage, by_name[name]) for name in CARDS if name in by_name}
    if declares_files(cards):
        _check_no_revision(entry, option)
        return [by_name[name] for name in declared_names(list(by_name), cards, entry, option)]
    _check_no_hub_options(entry, option)
    return [by_name[name] for name in data_files_among(sorted(by_name), entry, option)]


def _read_text(storage: Storage, file: RemoteFile) -> str:
    content = with_retries(lambda: b"".join(storage.read(file, 0)[1]), file.url)
    return content.decode("utf-8", errors="replace")


def _remote_source(entry: DatasetEntry, option: str, downloads: Path) -> DownloadedSource:
    storage, files = remote_files(entry, option)
    ds_type = type_of([PurePosixPath(file.name) for file in files], entry, option)
    fetched = fetch_all(files, storage, downloads, f"{option}.path")
    return DownloadedSource(entry.path, tuple(download.path for download in fetched), ds_type, tuple(fetched))


def _names(entry: DatasetEntry) -> Sequence[str]:
    return [entry.data_files] if isinstance(entry.data_files, str) else entry.data_files or ()


def _hub_source(entry: DatasetEntry, option: str, token: str | bool | None) -> Source:
    _check_hub_types(entry, option)
    # Importing `datasets` takes seconds, and every rank imports this package: import it only for Hub datasets.
    from xorl.data.hub import load_hub_source  # noqa: PLC0415

    return load_hub_source(entry, option=option, token=token)


def _hub_urls(entry: DatasetEntry, option: str, token: str | bool | None) -> list[str]:
    _check_hub_types(entry, option)
    from xorl.data.hub import split_files  # noqa: PLC0415  (as above)

    return split_files(entry.path, entry, option=option, token=token)


def _check_hub_types(entry: DatasetEntry, option: str) -> None:
    for file in _names(entry):
        # The `datasets` library derives the type from the name.
        if entry.ds_type is not None and file_type(Path(file)) != entry.ds_type:
            raise DataError(
                f"{option}.ds_type: {entry.ds_type}, but the name of {file} on the Hub is not that of a "
                f"{entry.ds_type} file; correct ds_type, or download the file and set path to your copy"
            )
