"""Folders written by `datasets.save_to_disk`: finds their Arrow files and reads documents from them in place."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa

from xorl.data.chunks import table_chunks
from xorl.data.errors import DataError
from xorl.data.formats import EncodedDocuments, TokenizedFormat, as_numpy
from xorl.data.images.table import StoredImage
from xorl.data.readers import arrow_batches
from xorl.data.receipt import Counts, Findings

_STATE = "state.json"
_SPLITS = "dataset_dict.json"


def is_saved_folder(folder: Path) -> bool:
    """Whether `datasets` wrote this folder, as a dataset or a dataset dict."""
    return (folder / _STATE).is_file() or (folder / _SPLITS).is_file()


def saved_files(folder: Path, split: str | None, *, option: str) -> list[Path]:
    """The Arrow files of a saved dataset, or of one split of a saved dataset dict (default: `train`)."""
    if (folder / _SPLITS).is_file():
        splits = _read_json(folder / _SPLITS).get("splits")
        names = splits if isinstance(splits, list) else []
        if (split or "train") not in names:
            raise DataError(f"{option}.split: {folder} has no split {split or 'train'!r}; it has {', '.join(names)}")
        folder = folder / (split or "train")
    elif split not in (None, "train"):
        raise DataError(f"{option}.split: {folder} is a single dataset without splits, so it has no {split!r}")
    state = _read_json(folder / _STATE)
    if state.get("_indices_data_files"):
        raise DataError(f"{folder} was saved with a row index by an old version of datasets; save it again")
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{folder / _STATE} lists no data files; save the dataset again")
    files = [folder / str(entry["filename"]) for entry in entries]
    for file in files:
        if not file.is_file():
            raise DataError(f"{file} is missing, but {folder / _STATE} lists it; save the dataset again")
    return files


class SavedStore:
    """A saved dataset whose rows are already documents (lists of ids without padding), read in place.

    The constructor reads all rows once, to check and count them. It raises DataError if a row would need preparing.
    """

    def __init__(self, files: list[Path], fmt: TokenizedFormat, key: str) -> None:
        self.key = key
        self.extra_names = fmt.extras
        self._files, self._format = files, fmt
        self._map()
        self.counts, self.findings = Counts(), Findings()
        self.largest_id, self.largest_id_row = -1, -1
        lengths, num_trained = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for documents in self._checked():
            if documents.largest_id > self.largest_id:
                self.largest_id = documents.largest_id
                self.largest_id_row = self.counts.samples + documents.largest_id_row
            self.counts += documents.counts
            self.findings += documents.findings
            lengths.append(documents.lengths)
            num_trained.append(documents.num_trained)
        self.lengths = np.concatenate(lengths)
        self.num_trained = np.concatenate(num_trained)

    def _map(self) -> None:
        batches = ((file, batch) for file in self._files for batch in arrow_batches(file))
        self._batches = [_columns(batch, self._format, file) for file, batch in batches if batch.num_rows]
        self._starts = [0, *accumulate(len(offsets) - 1 for offsets, _ in self._batches)]

    def _checked(self) -> Iterator[EncodedDocuments]:
        labelled: bool | None = None
        for file in self._files:
            first = 0
            for batch in arrow_batches(file):
                for chunk in table_chunks(pa.Table.from_batches([batch]), str(file), first):
                    documents = self._format.encode(chunk)
                    mixed = labelled not in (None, documents.has_labels)
                    if mixed or documents.counts.masked_tokens or documents.counts.empty:
                        raise DataError(
                            f"{chunk.location(0)} and the rows after it have padding, empty samples, or a mix of "
                            "samples with and without labels; set skip_prepare=False"
                        )
                    labelled = documents.has_labels
                    yield documents
                first += batch.num_rows

    def document(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        columns, span = self._locate(row)
        ids = columns["input_ids"][span].astype(np.int32)
        return ids, columns["labels"][span].astype(np.int32) if "labels" in columns else ids

    def extras(self, row: int) -> dict[str, np.ndarray]:
        columns, span = self._locate(row)
        return {name: columns[name][span].astype(np.float32) for name in self.extra_names}

    def images(self, row: int) -> list[StoredImage]:
        return []

    def image_patches(self) -> np.ndarray | None:
        return None

    def _locate(self, row: int) -> tuple[dict[str, np.ndarray], slice]:
        index = bisect_right(self._starts, row) - 1
        offsets, columns = self._batches[index]
        local = row - self._starts[index]
        return columns, slice(offsets[local], offsets[local + 1])

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name not in ("_batches", "_starts")}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._map()


def _columns(batch: pa.RecordBatch, fmt: TokenizedFormat, file: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The document offsets and the flat columns of a batch, without copying."""
    present = [name for name in fmt.wanted if name in batch.schema.names and name != "attention_mask"]
    names = [name for name in present if batch.column(name).null_count < batch.num_rows]
    columns: dict[str, np.ndarray] = {}
    offsets = np.zeros(1, np.int64)
    for name in names:
        column = batch.column(name)
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        values = column.flatten() if is_list else column
        is_number = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
        if not is_list or not is_number or column.null_count or values.null_count:
            raise DataError(
                f"{file}: column {name!r} is {column.type}, want lists of numbers without nulls; "
                "skip_prepare=False accepts more types"
            )
        columns[name] = as_numpy(values)
        if name == "input_ids":
            offsets = as_numpy(column.offsets).astype(np.int64)
    if "input_ids" not in columns:
        raise DataError(f"{file}: column 'input_ids' does not exist; the columns are: {', '.join(batch.schema.names)}")
    return offsets - offsets[0], columns


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}
