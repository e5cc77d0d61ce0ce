"""DatasetEntry: the configuration of one dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from xorl.data.arguments import check_fields, convert_fields_
from xorl.data.errors import DataError
from xorl.data.formats import Overflow
from xorl.data.readers import FileType

DUMMY = "dummy"  # the path of an entry of synthetic rows

EntryType = Literal["tokenized", "chat", "prompt_completion", "preference", "text", "auto"]
TrainOn = Literal["assistant", "completion", "all", "last_turn"]


@dataclass(frozen=True)
class DatasetEntry:
    """One dataset. The README describes the fields under Sources, Mixtures and Formats.

    `columns` (type tokenized) are the columns to read: None reads input_ids, and labels and attention_mask if they
    exist; other columns become per-token extras. `column_names` (all other types) maps the names that a type expects to
    the names in the data, such as {"prompt": "query"}. In the files of xorl-cli, these two are called
    `select_columns` and `columns`, and all other fields as here. `overflow` None is truncate, or drop for preference,
    whose pairs cannot be cut. Paths may be given as Path.
    """

    path: str
    type: EntryType = "tokenized"
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    data_files: str | Sequence[str] | None = None
    ds_type: FileType | None = None
    max_seq_len: int | None = None
    overflow: Overflow | None = None
    shards: int | None = None
    shards_idx: int | None = None
    preprocess_shards: int | None = None
    columns: tuple[str, ...] | None = None
    weight: float | None = None
    num_epochs: float | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    train_on: TrainOn | None = None
    column_names: Mapping[str, str] = field(default_factory=dict)
    overflow_limit: float | None = None
    skip_bad_rows: float | None = None
    ignore_columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        convert_fields_(self)


_DEFAULTS = DatasetEntry(DUMMY)
_NOT_OF_DUMMY = (
    *("type", "name", "split", "revision", "data_files", "ds_type", "shards", "shards_idx", "preprocess_shards"),
    *("columns", "chat_template", "chat_template_kwargs", "train_on", "column_names", "skip_bad_rows"),
    "ignore_columns",
)


def check_entry(entry: DatasetEntry, option: str, bin_len: int) -> None:
    """Raises DataError for invalid or conflicting options of an entry."""
    check_fields(entry, f"{option}.")
    if entry.max_seq_len is not None and not 1 <= entry.max_seq_len <= bin_len:
        raise DataError(
            f"{option}.max_seq_len: {entry.max_seq_len}, want 1 to {bin_len}, the bin length (bin_len), because a "
            "longer sample would not fit into a bin"
        )
    unused = next((name for name in _NOT_OF_DUMMY if getattr(entry, name) != getattr(_DEFAULTS, name)), None)
    if entry.path == DUMMY and unused is not None:
        raise DataError(
            f"{option}.{unused}: {getattr(entry, unused)!r} has no effect on dummy, whose rows are synthetic; remove it"
        )
    if entry.columns is not None and "input_ids" not in entry.columns:
        raise DataError(f"columns: {list(entry.columns)} does not include input_ids, which every dataset needs; add it")
    if (entry.shards is None) != (entry.shards_idx is None):
        raise DataError(f"{option}: shards and shards_idx go together, got {entry.shards} and {entry.shards_idx}")
    if entry.preprocess_shards is not None and entry.shards is not None:
        raise DataError(f"{option}: set shards or preprocess_shards, not both")
    if entry.data_files is not None and not entry.data_files:
        raise DataError(f"{option}.data_files: is empty; name at least one file, or leave it out")
    if entry.overflow_limit is not None and not 0 <= entry.overflow_limit <= 1:
        raise DataError(f"{option}.overflow_limit: {entry.overflow_limit} is not a fraction from 0 to 1")
    if entry.skip_bad_rows is not None and not 0 <= entry.skip_bad_rows <= 1:
        raise DataError(f"{option}.skip_bad_rows: {entry.skip_bad_rows} is not a fraction from 0 to 1")
    if entry.preprocess_shards is not None and entry.preprocess_shards < 1:
        raise DataError(f"{option}.preprocess_shards: {entry.preprocess_shards}, want at least 1")
    if entry.shards is not None and entry.shards_idx is not None and not 0 <= entry.shards_idx < entry.shards:
        raise DataError(
            f"{option}.shards_idx: {entry.shards_idx} is not in 0..{entry.shards - 1} (shards: {entry.shards})"
        )
