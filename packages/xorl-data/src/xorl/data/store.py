"""Stores of encoded documents: folders of memory-mapped flat arrays, published atomically.

A folder contains the tokens of all documents on one axis: `input_ids.i32`, `labels.i32` if they differ from the ids,
and `extra_{index}.f32`, each in one file or several. It also contains `offsets.i64`, `num_trained.i32`, `manifest.json`
and, if documents have images, `images.rec` and `image_sources.bin`. It never changes after publication. The synthetic
documents of `dummy` are also defined here.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from xorl.data.errors import DataError
from xorl.data.formats import EncodedDocuments
from xorl.data.hashing import JSON, digest
from xorl.data.images.table import RECORD, ImageTable, StoredImage
from xorl.data.receipt import Counts, Findings

# Part of every folder's name. Increment it when the format of the files, or the documents made from rows, change.
FORMAT_VERSION = 6
# Part of every key. The order of documents is drawn from the key, and should stay the same for the same data.
KEY_VERSION = 4
MANIFEST = "manifest.json"
IMAGE_RECORDS, IMAGE_SOURCES = "images.rec", "image_sources.bin"
_COPY_BYTES = 16 << 20


class DocumentStore(Protocol):
    """Random access to documents in the order of their source. Pickles as a path or arguments, never as content."""

    key: str
    lengths: np.ndarray  # [N] int64
    num_trained: np.ndarray  # [N]
    extra_names: tuple[str, ...]

    def document(self, row: int) -> tuple[np.ndarray, np.ndarray]: ...

    def extras(self, row: int) -> dict[str, np.ndarray]: ...

    def images(self, row: int) -> list[StoredImage]: ...

    def image_patches(self) -> np.ndarray | None: ...


@dataclass(frozen=True)
class StoreManifest:
    """The metadata of a published folder. `request` has the options it was prepared for, without content hashes."""

    key: str
    name: str
    request: dict[str, JSON]
    created: float
    counts: Counts
    num_documents: int
    longest: int
    extra_names: tuple[str, ...]
    has_labels_file: bool
    largest_id: int
    largest_id_row: int
    files: dict[str, int]
    # The key of the dataset: differs from `key` if this is one of several separately prepared parts.
    whole: str = ""
    num_files: int = 1
    findings: Findings = field(default_factory=Findings)

    def write(self, folder: Path) -> None:
        values = {
            **vars(self),
            "counts": vars(self.counts),
            "findings": vars(self.findings),
            "format_version": FORMAT_VERSION,
        }
        (folder / MANIFEST).write_text(json.dumps(values, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> StoreManifest:
        path = folder / MANIFEST
        try:
            values = json.loads(path.read_text())
            version = values.pop("format_version")
            if version != FORMAT_VERSION:
                raise DataError(f"{folder} was prepared in format {version}, but this version reads {FORMAT_VERSION}")
            values["counts"] = Counts.from_dict(values["counts"])
            values["findings"] = Findings.from_dict(values["findings"])
            values["extra_names"] = tuple(values["extra_names"])
            return cls(**values)
        except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: not the manifest of a prepared dataset: {error!r}") from error


def find_prepared(root: Path, request: Mapping[str, JSON], option: str) -> Path:
    """Returns the newest folder below `root` that was prepared for `request`.

    If there is none, raises a DataError that lists the existing ones.
    """
    found: list[tuple[Path, StoreManifest]] = []
    for path in sorted(root.glob(f"*/{MANIFEST}")):
        try:
            found.append((path.parent, StoreManifest.read(path.parent)))
        except DataError:
            # Written in another format version, so it cannot be loaded.
            continue
    matching = [(manifest.created, folder) for folder, manifest in found if manifest.request == request]
    if matching:
        return max(matching)[1]
    lines = [
        f"  {folder.name} of {time.strftime('%Y-%m-%d %H:%M', time.localtime(manifest.created))}: {manifest.name}, but "
        + ", ".join(f"{k}={v}" for k, v in manifest.request.items() if v != request.get(k))
        for folder, manifest in found
    ]
    raise DataError(
        f"{option}: {root} has no prepared dataset for {request['path']} with these options, and "
        "skip_prepare=True forbids preparing one. It has:\n" + ("\n".join(lines) or "  nothing")
    )


class FlatStore:
    """A published folder, memory-mapped. Raises DataError if the files do not match the manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = StoreManifest.read(folder)
        for name, size in self.manifest.files.items():
            path = folder / name
            actual = path.stat().st_size if path.is_file() else None
            if actual != size:
                state = "is missing" if actual is None else f"has {actual} bytes"
                raise DataError(
                    f"{path} {state}, but the manifest says {size} bytes; remove {folder} and prepare again"
                )
        self.key = self.manifest.key
        self.extra_names = self.manifest.extra_names
        self._offsets = _mapped(folder / "offsets.i64", np.int64)
        self._input_ids = self._tokens("input_ids.i32", np.int32)
        self._labels = self._tokens("labels.i32", np.int32) if self.manifest.has_labels_file else self._input_ids
        self._extras = {
            name: self._tokens(_extra_file(index), np.float32) for index, name in enumerate(self.extra_names)
        }
        self.lengths = np.diff(self._offsets)
        self.num_trained = _mapped(folder / "num_trained.i32", np.int32)
        self.image_table = ImageTable.empty()
        if IMAGE_RECORDS in self.manifest.files:
            sources = _mapped(folder / IMAGE_SOURCES, np.uint8)
            self.image_table = ImageTable(_mapped(folder / IMAGE_RECORDS, RECORD), sources)

    def document(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        span = slice(self._offsets[row], self._offsets[row + 1])
        return self._input_ids[span], self._labels[span]

    def extras(self, row: int) -> dict[str, np.ndarray]:
        span = slice(self._offsets[row], self._offsets[row + 1])
        return {name: values[span] for name, values in self._extras.items()}

    def images(self, row: int) -> list[StoredImage]:
        return self.image_table.of_document(row)

    def image_patches(self) -> np.ndarray | None:
        return self.image_table.patches(len(self.lengths)) if len(self.image_table.records) else None

    def _tokens(self, name: str, dtype: type[np.generic]) -> np.ndarray | _SplitArray:
        num = self.manifest.num_files
        arrays = [_mapped(self.folder / part, dtype) for part in _part_names(name, num)]
        return arrays[0] if num == 1 else _SplitArray(arrays)

    def __reduce__(self) -> tuple[type[FlatStore], tuple[Path]]:
        return FlatStore, (self.folder,)


class _SplitArray:
    """One array in several files. No document crosses a file boundary, so each read touches one file."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays = arrays
        self._starts = [0, *accumulate(map(len, arrays))]

    def __getitem__(self, span: slice) -> np.ndarray:
        part = bisect_right(self._starts, span.start) - 1
        first = self._starts[part]
        return self._arrays[part][span.start - first : span.stop - first]


class PartedStore:
    """One dataset in several separately prepared stores, in row order."""

    def __init__(self, parts: Sequence[FlatStore]) -> None:
        self._parts = tuple(parts)
        self.key = parts[0].manifest.whole
        self.extra_names = parts[0].extra_names
        self._starts = [0, *accumulate(len(part.lengths) for part in parts)]
        self.lengths = np.concatenate([part.lengths for part in parts])
        self.num_trained = np.concatenate([part.num_trained for part in parts])

    def document(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        part, local = self._locate(row)
        return part.document(local)

    def extras(self, row: int) -> dict[str, np.ndarray]:
        part, local = self._locate(row)
        return part.extras(local)

    def images(self, row: int) -> list[StoredImage]:
        part, local = self._locate(row)
        return part.images(local)

    def image_patches(self) -> np.ndarray | None:
        return joined_patches(self._parts)

    def _locate(self, row: int) -> tuple[FlatStore, int]:
        part = bisect_right(self._starts, row) - 1
        return self._parts[part], row - self._starts[part]

    def __reduce__(self) -> tuple[type[PartedStore], tuple[tuple[FlatStore, ...]]]:
        return PartedStore, (self._parts,)


def joined_patches(stores: Sequence[DocumentStore]) -> np.ndarray | None:
    """[N, 2]: `image_patches` of the documents of all stores in turn; None if none has images."""
    found = [store.image_patches() for store in stores]
    if all(each is None for each in found):
        return None
    return np.concatenate(
        [np.zeros((len(store.lengths), 2)) if each is None else each for store, each in zip(stores, found, strict=True)]
    )


class FlatStoreWriter:
    """Writes a folder chunk by chunk; `finish` makes it durable. The caller publishes it by a rename."""

    def __init__(self, folder: Path, extra_names: tuple[str, ...]) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._extra_names = extra_names
        self._files: dict[str, BinaryIO] = {}
        self._lengths: list[np.ndarray] = []
        self._num_trained: list[np.ndarray] = []
        self._num_documents = self._num_source_bytes = 0

    def append(self, documents: EncodedDocuments) -> None:
        # Most corpora train on every token, so the labels file is only created when labels first differ from the ids.
        # It then starts as a copy of the ids written so far.
        if documents.labels is not None and "labels.i32" not in self._files and "input_ids.i32" in self._files:
            self._files["input_ids.i32"].flush()
            shutil.copyfile(self._folder / "input_ids.i32", self._folder / "labels.i32")
        self._write("input_ids.i32", documents.input_ids)
        if documents.labels is not None or "labels.i32" in self._files:
            self._write("labels.i32", documents.input_ids if documents.labels is None else documents.labels)
        for index, name in enumerate(self._extra_names):
            self._write(_extra_file(index), documents.extras[name])
        self._append_images(documents.images)
        self._num_documents += len(documents.lengths)
        self._lengths.append(documents.lengths)
        self._num_trained.append(documents.num_trained.astype(np.int32))

    def finish(
        self,
        *,
        key: str,
        name: str,
        request: Mapping[str, JSON],
        created: float,
        counts: Counts,
        largest_id: tuple[int, int],
        whole: str,
        num_files: int = 1,
        findings: Findings,
    ) -> None:
        """Splits the tokens into `num_files` files of whole documents. DataError if there are fewer documents."""
        lengths = np.concatenate(self._lengths)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        token_files = tuple(name for name in self._files if name not in (IMAGE_RECORDS, IMAGE_SOURCES))
        self._write("offsets.i64", offsets)
        self._write("num_trained.i32", np.concatenate(self._num_trained))
        sizes = {name: file.tell() for name, file in self._files.items()}
        self.close()
        if num_files > 1:
            if len(lengths) < num_files:
                raise DataError(
                    f"num_files: {num_files} files are more than the {len(lengths)} documents; "
                    f"set it to {len(lengths)} or less"
                )
            bounds = _even_cuts(offsets, num_files)
            for name in token_files:
                sizes |= self._cut(name, sizes.pop(name) // int(offsets[-1]), bounds)
        StoreManifest(
            key=key,
            name=name,
            request=dict(request),
            created=created,
            counts=counts,
            num_documents=len(lengths),
            longest=int(lengths.max()),
            extra_names=self._extra_names,
            has_labels_file="labels.i32" in token_files,
            largest_id=largest_id[0],
            largest_id_row=largest_id[1],
            files=sizes,
            whole=whole,
            num_files=num_files,
            findings=findings,
        ).write(self._folder)
        for name in (*sizes, MANIFEST):
            fsync(self._folder / name)
        fsync(self._folder)

    def _cut(self, name: str, item_bytes: int, bounds: Sequence[int]) -> dict[str, int]:
        """Splits a file into the token ranges [bounds[i], bounds[i + 1]). Returns the size of each part by name."""
        sizes: dict[str, int] = {}
        with (self._folder / name).open("rb") as whole:
            for part, (start, stop) in zip(_part_names(name, len(bounds) - 1), pairwise(bounds), strict=True):
                sizes[part] = left = (stop - start) * item_bytes
                with (self._folder / part).open("wb") as file:
                    while left:
                        left -= file.write(whole.read(min(left, _COPY_BYTES)))
        (self._folder / name).unlink()
        return sizes

    def _append_images(self, images: ImageTable) -> None:
        if not len(images.records):
            return
        records = images.records.copy()
        records["document"] += self._num_documents
        records["offset"] += self._num_source_bytes
        self._write(IMAGE_RECORDS, records)
        self._write(IMAGE_SOURCES, images.sources)
        self._num_source_bytes += len(images.sources)

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def discard(self) -> None:
        """Closes the files, ignoring write errors of buffered data. Does nothing after `finish`."""
        while self._files:
            with suppress(OSError):
                self._files.popitem()[1].close()

    def _write(self, name: str, values: np.ndarray) -> None:
        if name not in self._files:
            # Append mode: the labels file may already contain a copy of the ids.
            self._files[name] = (self._folder / name).open("ab")
        self._files[name].write(values.tobytes())


class SyntheticStore:
    """`num_documents` documents of `length` uniformly random ids, computed from the arguments, not stored."""

    extra_names: tuple[str, ...] = ()

    def __init__(self, num_documents: int, length: int, vocab_size: int, seed: str) -> None:
        self._arguments = (num_documents, length, vocab_size, seed)
        self.key = digest("synthetic", *self._arguments)
        self.lengths = np.full(num_documents, length, dtype=np.int64)
        self.num_trained = np.maximum(self.lengths - 1, 0)

    def document(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        _, length, vocab_size, _ = self._arguments
        generator = np.random.Generator(np.random.Philox(key=int(self.key, 16), counter=int(row) << 128))
        ids = generator.integers(0, vocab_size, length, dtype=np.int32)
        return ids, ids

    def extras(self, row: int) -> dict[str, np.ndarray]:
        return {}

    def images(self, row: int) -> list[StoredImage]:
        return []

    def image_patches(self) -> np.ndarray | None:
        return None

    def __reduce__(self) -> tuple[type[SyntheticStore], tuple[int, int, int, str]]:
        return SyntheticStore, self._arguments


def make_prepared_folder(path: Path) -> None:
    """Creates a folder in `prepared_path`. Raises DataError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"prepared_path: {path} cannot be created: {error.strerror}") from error


def fsync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _even_cuts(offsets: np.ndarray, num: int) -> list[int]:
    """The `num` + 1 token offsets that split the documents as evenly as possible, at least one in each part."""
    wanted = np.searchsorted(offsets, offsets[-1] * np.arange(1, num) // num)
    documents = [0]
    for index, cut in enumerate(wanted.tolist(), 1):
        documents.append(min(max(cut, documents[-1] + 1), len(offsets) - 1 - num + index))
    return [int(offsets[document]) for document in (*documents, len(offsets) - 1)]


def _part_names(name: str, num: int) -> list[str]:
    stem, _, suffix = name.rpartition(".")
    return [name] if num == 1 else [f"{stem}-{index:05}-of-{num:05}.{suffix}" for index in range(num)]


def _extra_file(index: int) -> str:
    return f"extra_{index}.f32"


def _mapped(path: Path, dtype: type[np.generic] | np.dtype) -> np.ndarray:
    # A plain array view, because slicing np.memmap itself takes several times longer.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
