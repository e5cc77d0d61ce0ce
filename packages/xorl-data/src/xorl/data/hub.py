"""Datasets of the Hugging Face Hub, loaded with the `datasets` library; imported only when needed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import datasets
import pyarrow as pa
from datasets.exceptions import DatasetNotFoundError, DatasetsError

from xorl.data.chunks import Chunk, table_chunks
from xorl.data.entry import DatasetEntry
from xorl.data.errors import DataError, DataFailure
from xorl.data.hashing import JSON, digest, hash_files

# Fields of a dataset's config that do not affect how its files are read.
_NOT_OF_READING = frozenset(
    ("name", "version", "data_dir", "data_files", "description", "features", "chunksize", "batch_size", "block_size")
)


@dataclass(frozen=True)
class HubSource:
    """One split of a Hub dataset, in the cache of `datasets`."""

    name: str
    split: str
    dataset: datasets.Dataset

    @property
    def num_bytes(self) -> int:
        return self._table().nbytes

    @property
    def parallel(self) -> bool:
        return False

    def identity(self) -> JSON:
        files = [Path(file["filename"]) for file in self.dataset.cache_files]
        content = hash_files(files) if files else digest(self.dataset.to_list())
        # A slice such as train[:10%] shares its cache files with the whole split, so the files are not enough.
        return {"files": content, "split": self.split, "rows": len(self.dataset)}

    def chunks(self, selected: Sequence[str] | None) -> Iterator[Chunk]:
        yield from table_chunks(self._table(), f"{self.name} (split {self.split})")

    def _table(self) -> pa.Table:
        rows = self.dataset.with_format("arrow")[:]
        assert isinstance(rows, pa.Table), "the arrow format returns tables"
        return rows


def load_hub_source(entry: DatasetEntry, *, option: str, token: str | bool | None) -> HubSource:
    """Returns the dataset, downloading it if it is not in the cache.

    Raises DataError if the dataset, its config or its split does not exist, DataFailure if the Hub cannot be reached.
    """
    split = entry.split or "train"
    with _translated_errors(entry.path, split, option):
        dataset = datasets.load_dataset(
            entry.path,
            entry.name,
            split=split,
            revision=entry.revision,
            data_files=_as_list(entry.data_files),
            token=token,
        )
    assert isinstance(dataset, datasets.Dataset), "a single split was requested"
    return HubSource(entry.path, split, dataset)


def split_files(path: str, entry: DatasetEntry, *, option: str, token: str | bool | None = None) -> list[str]:
    """The files (URLs, or paths of a local folder) of one split of a dataset, without downloading or reading them.

    `path` is the id of a Hub dataset, or a local folder. Raises as load_hub_source does.
    """
    split = entry.split or "train"
    # The builder creates a folder for its lock, although it prepares nothing.
    with _translated_errors(entry.path, split, option), tempfile.TemporaryDirectory(prefix="xorl-datasets-") as cache:
        builder = datasets.load_dataset_builder(
            path,
            entry.name,
            revision=entry.revision,
            data_files=_as_list(entry.data_files),
            token=token,
            cache_dir=cache,
        )
    _check_reading(builder.config, entry.path, option)
    splits = builder.config.data_files or {}
    if split not in splits:
        raise DataError(f"{option}.split: {entry.path} has no split {split!r}; it has {', '.join(map(str, splits))}")
    return [str(file) for file in splits[split]]


def _check_reading(config: datasets.BuilderConfig, path: str, option: str) -> None:
    """Raises DataError if the README of a dataset sets options for reading its files, such as a delimiter."""
    default = type(config)(name=config.name)
    for field in fields(config):
        value = getattr(config, field.name)
        is_tab = field.name == "sep" and value == "\t"  # of a .tsv file
        if field.name in _NOT_OF_READING or value == getattr(default, field.name) or is_tab:
            continue
        raise DataError(
            f"{option}.path: {path} sets {field.name}: {value!r} for its config {config.name}, which xorl does not "
            "support; convert its files, or name them with data_files and ds_type"
        )


def _as_list(data_files: str | Sequence[str] | None) -> str | list[str] | None:
    return data_files if data_files is None or isinstance(data_files, str) else list(data_files)


@contextmanager
def _translated_errors(path: str, split: str, option: str) -> Iterator[None]:
    """Translates exceptions of `datasets` to DataError and DataFailure."""
    try:
        yield
    except DatasetNotFoundError as error:
        raise DataError(
            f"{option}.path: {path} is neither a path on this machine nor a dataset on the Hub: {error}"
        ) from error
    except ConnectionError as error:
        raise DataFailure(
            f"{option}.path: {path} is not a path on this machine, and the Hugging Face Hub cannot be reached: {error}"
        ) from error
    except (ValueError, FileNotFoundError, DatasetsError) as error:
        # These errors already list the existing configs and splits; an example of Python code may follow.
        reason = " ".join(str(error).partition("\nExample of usage")[0].split())
        hint = f"; set {option}.name" if "Config name is missing" in reason else ""
        raise DataError(f"{option}: {path} (split {split}) cannot be loaded: {reason}{hint}") from error
