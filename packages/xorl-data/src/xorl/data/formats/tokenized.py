"""The tokenized format: rows of token ids, optionally with labels, an attention mask and other per-token columns.

`encode` has two paths that return the same arrays. The vectorised one works on Arrow lists and returns None for
irregular data. The plain one goes row by row, accepts every notation (lists, JSON strings, space-separated ids) and
raises the errors. Array legend: T tokens of all documents on one axis, N documents, R rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from xorl.data.arguments import check_fields
from xorl.data.batch import IGNORE, WEIGHTS
from xorl.data.chunks import Chunk, Row, WithoutColumns
from xorl.data.columns import COLUMNS, ROW_MASKS
from xorl.data.errors import DataError
from xorl.data.formats.encoded import EncodedDocuments, EncodedRows, Overflow, apply_overflow, encode_usable, id_problem
from xorl.data.hashing import JSON
from xorl.data.receipt import Counts, Findings

_LARGEST_ID = 2**31 - 1
_USE_WEIGHTS = f'multiply the losses with columns=["input_ids", "{WEIGHTS}"] (and "labels", if there are any), '


@dataclass(frozen=True)
class TokenizedFormat:
    """Rows of token ids. `columns` None reads COLUMNS; other columns become per-token extras.

    Rows are read as if they had none of the columns `ignored`.
    """

    limit: int
    overflow: Overflow
    limit_option: str
    columns: tuple[str, ...] | None = None
    vocab_size: int | None = None
    skip_bad_rows: bool = False
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def wanted(self) -> tuple[str, ...]:
        if self.columns is None:
            return COLUMNS
        return ("input_ids", *(name for name in self.columns if name != "input_ids"))

    @property
    def extras(self) -> tuple[str, ...]:
        return tuple(name for name in self.wanted if name not in COLUMNS)

    @property
    def selected(self) -> tuple[str, ...] | None:
        return self.columns

    @property
    def tokenizer(self) -> None:
        return None

    @property
    def masks_prompts(self) -> bool:
        # The labels are part of the data, so training on every token may be intended.
        return False

    @property
    def uses_current_date(self) -> bool:
        return False

    def fingerprint(self) -> dict[str, JSON]:
        # Without vocab_size, because the largest id of a cached dataset is checked when the dataset is loaded.
        columns = None if self.columns is None else list(self.wanted)
        skip: dict[str, JSON] = {"skip_bad_rows": True} if self.skip_bad_rows else {}
        ignored: dict[str, JSON] = {"ignored": [*self.ignored]} if self.ignored else {}
        fields: dict[str, JSON] = {"type": "tokenized", "limit": self.limit, "overflow": self.overflow}
        weights: dict[str, JSON] = {"labels_of_weight_0": False} if WEIGHTS in self.extras else {}
        return {**fields, "columns": columns, **skip, **ignored, **weights}

    def encode(self, chunk: Chunk) -> EncodedDocuments:
        """Encodes one chunk and applies the overflow policy. Raises DataError, with the location, for unusable rows."""
        chunk = WithoutColumns(chunk, self.ignored) if self.ignored else chunk
        rows, usable = encode_usable(chunk, self._encode_chunk, skip_bad_rows=self.skip_bad_rows)
        rows = _without_weightless_labels(rows)
        return apply_overflow(replace(rows, counts=rows.counts + _count_misaligned(rows)), usable, self)

    def _encode_chunk(self, chunk: Chunk) -> EncodedRows:
        names = chunk.names()
        unused = tuple(name for name in names if name not in self.wanted)
        if self.columns is None and chunk.may_have(ROW_MASKS):
            _check_masks(chunk)
        if "input_ids" not in names and unused == ("text",):
            unused = ()  # a text file, whose lines are ids
        table = chunk.table(self.wanted) if names else None
        rows = None if table is None else _encode_table(table, self)
        if rows is None:
            rows = _encode_rows(chunk.rows(), chunk, self)
        return replace(rows, findings=Findings(unused))


def _check_masks(chunk: Chunk) -> None:
    """Raises DataError for columns that mask or weight tokens in other trainers. Only for entries that select none."""
    for index, row in enumerate(chunk.rows()):
        found = [name for name in row if name in ROW_MASKS and row[name] is not None]
        if found:
            raise DataError(
                f"{chunk.location(index)}: column {found[0]!r} masks tokens or gives them weights in other trainers, "
                f"and xorl would ignore it: it trains the tokens whose labels are not {IGNORE}. Write the mask into "
                f"labels, {_USE_WEIGHTS if found[0] == WEIGHTS else ''}or leave the column out with "
                f"ignore_columns=[{found[0]!r}]"
            )


def _encode_table(table: pa.Table, fmt: TokenizedFormat) -> EncodedRows | None:
    """The vectorised path; None if a row needs the plain path, because of its notation or for its error message."""
    columns: dict[str, np.ndarray] = {}
    lengths: np.ndarray | None = None
    for name in fmt.wanted:
        lists = _flat_lists(table.column(name)) if name in table.column_names else None
        if lists is None:
            is_missing = name not in table.column_names or table.column(name).null_count == table.num_rows
            if fmt.columns is None and name != "input_ids" and is_missing:
                continue
            return None
        columns[name], column_lengths = lists
        lengths = column_lengths if lengths is None else lengths
        if not np.array_equal(column_lengths, lengths):
            return None
    ids, labels, mask = (columns.get(name) for name in COLUMNS)
    if lengths is None or ids is None or not _valid_ids(ids, fmt.vocab_size):
        return None
    if labels is not None:
        if not np.issubdtype(labels.dtype, np.integer) or not _valid_labels(labels, fmt.vocab_size):
            return None
        labels = labels.astype(np.int32, copy=False)
    extras = {name: columns[name].astype(np.float32, copy=False) for name in fmt.extras}
    if WEIGHTS in extras and not np.all(np.isfinite(extras[WEIGHTS])):
        return None
    ids = ids.astype(np.int32, copy=False)
    rows = EncodedRows(ids, labels, extras, lengths, has_labels=labels is not None)
    if mask is None or bool(np.all(mask == 1)):
        return rows
    return _without_masked(rows, mask != 0) if bool(np.all((mask == 0) | (mask == 1))) else None


def _without_weightless_labels(rows: EncodedRows) -> EncodedRows:
    """Removes the labels of weight 0, which are not trained, so that nothing counts them as if they were."""
    if (weights := rows.extras.get(WEIGHTS)) is None:
        return rows
    labels = rows.input_ids if rows.labels is None else rows.labels
    return replace(rows, labels=np.where(weights == 0, np.int32(IGNORE), labels), has_labels=True)


def _count_misaligned(rows: EncodedRows) -> Counts:
    """Counts samples in which most labels differ from the token at the same position; a few may be intended."""
    if rows.labels is None:
        return Counts()
    ids, labels = rows.input_ids, rows.labels
    trained = labels != IGNORE
    same = labels == ids
    if np.array_equal(trained, same):
        return Counts()
    after = np.zeros(len(ids), dtype=np.bool_)
    after[:-1] = labels[:-1] == ids[1:]
    ends = np.cumsum(rows.lengths)

    def per_row(flags: np.ndarray) -> np.ndarray:
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(flags & trained)])
        return sums[ends] - sums[ends - rows.lengths]

    num_trained = per_row(trained)
    misaligned = 2 * per_row(same) < num_trained
    # The last label may be an end token that is not among the ids.
    shifted = misaligned & (per_row(after) >= np.maximum(num_trained - 1, 1))
    return Counts(misaligned=int(np.count_nonzero(misaligned)), shifted=int(np.count_nonzero(shifted)))


def _flat_lists(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray] | None:
    """A column of lists of numbers as (values, lengths); None for any other column."""
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return None
    chunk = column.combine_chunks()
    array = chunk.combine_chunks() if isinstance(chunk, pa.ChunkedArray) else chunk
    values = array.flatten()
    if pa.types.is_boolean(values.type) or (pa.types.is_null(values.type) and len(values) == 0):
        values = values.cast(pa.int8())
    numeric = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
    if array.null_count or values.null_count or not numeric:
        return None
    lengths = pc.call_function("list_value_length", [array])
    return as_numpy(values), as_numpy(lengths).astype(np.int64)


def as_numpy(array: pa.Array) -> np.ndarray:
    """A view of an Arrow array of numbers without nulls. Arrow's `to_numpy` imports pandas, which takes seconds."""
    return np.from_dlpack(array) if len(array) else np.empty(0, array.type.to_pandas_dtype())


def _valid_ids(ids: np.ndarray, vocab_size: int | None) -> bool:
    if not np.issubdtype(ids.dtype, np.integer):
        return False
    return not len(ids) or (ids.min() >= 0 and ids.max() < _end_of_ids(vocab_size))


def _valid_labels(labels: np.ndarray, vocab_size: int | None) -> bool:
    if _valid_ids(labels, vocab_size):
        return True
    return bool(np.all((labels == IGNORE) | ((labels >= 0) & (labels < _end_of_ids(vocab_size)))))


def _end_of_ids(vocab_size: int | None) -> int:
    return _LARGEST_ID + 1 if vocab_size is None else vocab_size


def _encode_rows(rows: Sequence[Row], chunk: Chunk, fmt: TokenizedFormat) -> EncodedRows:
    """The plain path: encodes row by row, with specific errors."""
    encoded = [_encode_row(row, index, chunk, fmt) for index, row in enumerate(rows)]
    labelled = [labels is not None for _, labels, _, _ in encoded]
    has_labels = any(labelled)
    if has_labels and not all(labelled):
        raise DataError(
            f"{chunk.location(labelled.index(False))}: the row has no labels, but other rows have them. Every token of "
            f"a row without labels would be trained; give every row labels ({IGNORE} where a token is not trained), or "
            'ignore the column with columns=["input_ids"]'
        )
    flat = EncodedRows(
        input_ids=_concatenate([ids for ids, _, _, _ in encoded], np.int32),
        labels=_concatenate([labels for _, labels, _, _ in encoded if labels is not None], np.int32)
        if has_labels
        else None,
        extras={name: _concatenate([e[name] for _, _, _, e in encoded], np.float32) for name in fmt.extras},
        lengths=np.array([len(ids) for ids, _, _, _ in encoded], dtype=np.int64),
        has_labels=has_labels,
    )
    if all(mask is None for _, _, mask, _ in encoded):
        return flat
    masks = [np.ones(len(ids), dtype=np.bool_) if mask is None else mask != 0 for ids, _, mask, _ in encoded]
    return _without_masked(flat, _concatenate(masks, np.bool_))


def _encode_row(
    row: Row, index: int, chunk: Chunk, fmt: TokenizedFormat
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None, dict[str, np.ndarray]]:
    optional = COLUMNS[1:] if fmt.columns is None else ()
    columns: dict[str, np.ndarray] = {}
    if "input_ids" not in row and len(row) == 1 and "text" in row:
        row = {"input_ids": row["text"]}  # from a text file
    for name in fmt.wanted:
        value = row.get(name)
        if value is None:
            if name in optional:
                continue
            option = (
                f"columns=[{', '.join(fmt.columns)}] selects it"
                if fmt.columns is not None
                else "type: tokenized needs it"
            )
            present = ", ".join(row) or "none"
            problem = "is null" if name in row else f"does not exist; the columns are: {present}"
            raise DataError(f"{chunk.location(index)}: column {name!r} {problem} ({option})")
        columns[name] = _numbers(value, name, index, chunk)
        if len(columns[name]) != len(columns["input_ids"] if "input_ids" in columns else columns[name]):
            raise DataError(
                f"{chunk.location(index)}: {name} has {len(columns[name])} values and input_ids has "
                f"{len(columns['input_ids'])}; they must have the same length"
            )
    ids, labels, mask = (columns.get(name) for name in COLUMNS)
    assert ids is not None, "input_ids is always in fmt.wanted, first"
    _check_ids(ids, "input_ids", index, chunk, fmt.vocab_size)
    if labels is not None:
        _check_ids(labels[labels != IGNORE], "labels", index, chunk, fmt.vocab_size)
    if mask is not None and not np.all((mask == 0) | (mask == 1)):
        raise DataError(f"{chunk.location(index)}: attention_mask contains values other than 0 and 1")
    extras = {name: columns[name] for name in fmt.extras}
    if WEIGHTS in extras and not np.all(np.isfinite(extras[WEIGHTS])):
        offender = extras[WEIGHTS][~np.isfinite(extras[WEIGHTS])][0]
        raise DataError(f"{chunk.location(index)}: {WEIGHTS} contains {offender}, want finite numbers")
    return ids, labels, mask, extras


def _numbers(value: object, name: str, index: int, chunk: Chunk) -> np.ndarray:
    """Numbers from a list, a JSON string or space-separated numbers; integers for COLUMNS, otherwise floats."""
    if isinstance(value, str):
        text = value.strip()
        with suppress(json.JSONDecodeError):
            value = json.loads(text if text.startswith("[") else f"[{','.join(text.split())}]")
    kinds = set(map(type, value)) if isinstance(value, list) else {type(value)}
    allowed = {int} if name in ("input_ids", "labels") else {int, bool} if name in COLUMNS else {int, float}
    if not isinstance(value, list) or not kinds <= allowed:
        wanted = "integers" if name in COLUMNS else "numbers, one per token"
        offender = next((v for v in value if type(v) not in allowed), value) if isinstance(value, list) else value
        hint = "" if name in COLUMNS else "; or leave it out of columns=[...]"
        if name == "input_ids" and isinstance(offender, str):
            hint = "; for text, set the entry's type to text, chat, prompt_completion or auto"
        shown = repr(offender)
        shown = shown if len(shown) <= 60 else shown[:60] + "..."
        raise DataError(
            f"{chunk.location(index)}: {name} contains {shown} ({type(offender).__name__}), "
            f"want a list of {wanted}{hint}"
        )
    try:
        return np.asarray(value, dtype=np.int64 if name in COLUMNS else np.float32)
    except OverflowError:
        raise DataError(f"{chunk.location(index)}: {name} contains a number that exceeds 64 bits") from None


def _check_ids(ids: np.ndarray, name: str, index: int, chunk: Chunk, vocab_size: int | None) -> None:
    if _valid_ids(ids, vocab_size):
        return
    offender = int(ids[(ids < 0) | (ids >= _end_of_ids(vocab_size))][0])
    raise DataError(f"{chunk.location(index)}: {id_problem(offender, name, vocab_size)}")


def _concatenate(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([array.astype(dtype, copy=False) for array in arrays]) if arrays else np.empty(0, dtype)


def _without_masked(rows: EncodedRows, mask: np.ndarray) -> EncodedRows:
    """Removes the tokens whose attention_mask is 0; otherwise padding would be packed, and attended to, as text."""
    kept = np.concatenate([np.zeros(1, np.int64), np.cumsum(mask)])
    ends = np.cumsum(rows.lengths)
    return replace(
        rows,
        input_ids=rows.input_ids[mask],
        labels=None if rows.labels is None else rows.labels[mask],
        extras={name: values[mask] for name, values in rows.extras.items()},
        lengths=kept[ends] - kept[ends - rows.lengths],
        counts=Counts(masked_tokens=len(mask) - int(kept[-1])),
    )
