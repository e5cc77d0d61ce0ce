"""EncodedDocuments, the result of every format, and the length policy that all formats share.

Array legend: T tokens of all documents on one axis, N documents, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, get_args

import numpy as np

from xorl.data.batch import IGNORE
from xorl.data.errors import DataError
from xorl.data.formats.tokenizer import TextTokenizer
from xorl.data.readers import Piece
from xorl.data.receipt import Counts
from xorl.data.shuffle import JSON

Overflow = Literal["truncate", "drop", "split", "error"]
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)


class Format(Protocol):
    """How the rows of one dataset entry become documents. Small to pickle: it is sent to the encoding processes.

    `limit` is the longest document in tokens, `limit_option` the option that sets it, for messages.
    """

    @property
    def limit(self) -> int: ...

    @property
    def overflow(self) -> Overflow: ...

    @property
    def limit_option(self) -> str: ...

    @property
    def vocab_size(self) -> int | None: ...

    @property
    def selected(self) -> tuple[str, ...] | None:
        """The columns that it reads, so that readers can skip the others; None: those of token ids."""
        ...

    @property
    def extras(self) -> tuple[str, ...]:
        """The per-token columns of its documents besides ids and labels."""
        ...

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """The tokenizer of its text; None if rows hold tokens already."""
        ...

    @property
    def masks_prompts(self) -> bool:
        """Whether only a part of each sample, the answer, is meant to be trained."""
        ...

    @property
    def writes_the_day(self) -> bool:
        """Whether the documents depend on the current date, because a template writes it into them."""
        ...

    def fingerprint(self) -> dict[str, JSON]:
        """Everything besides the samples that determines the documents: part of the cache key."""
        ...

    def encode(self, piece: Piece) -> EncodedDocuments:
        """The documents of a piece, in order. DataError names the file and row that is unusable."""
        ...


@dataclass(frozen=True)
class EncodedDocuments:
    """The documents of one piece. `labels` None: every token is its own label."""

    input_ids: np.ndarray  # [T] int32
    labels: np.ndarray | None  # [T] int32, IGNORE where not trained
    extras: dict[str, np.ndarray]  # each [T] float32
    lengths: np.ndarray  # [N] int64
    num_trained: np.ndarray  # [N] int64
    counts: Counts
    has_labels: bool
    largest_id: int
    largest_id_row: int


@dataclass(frozen=True)
class Rows:
    """Concatenated rows before the length policy; `lengths` [R]. `counted` holds the format's own counts."""

    input_ids: np.ndarray
    labels: np.ndarray | None
    extras: dict[str, np.ndarray]
    lengths: np.ndarray
    has_labels: bool
    counted: Counts = field(default_factory=Counts)


def id_problem(offender: int, name: str, vocab_size: int | None) -> str:
    """The message for an id outside the vocabulary, with what to check."""
    if offender < 0:
        other = f" (only {IGNORE} marks a label that is not trained)" if name == "labels" else ""
        return f"{name} holds the negative id {offender}{other}"
    if vocab_size is None:
        return f"{name} holds the id {offender}, beyond 32 bits"
    return (
        f"{name} holds the id {offender}, but the model's vocab_size is {vocab_size}, so that the largest id is "
        f"{vocab_size - 1}; was the data made with another tokenizer?"
    )


def fit(rows: Rows, piece: Piece, form: Format) -> EncodedDocuments:
    """Applies the overflow policy: rows [R] to documents [N]."""
    long = rows.lengths > form.limit
    if form.overflow == "error" and long.any():
        index = int(np.argmax(long))
        raise DataError(
            f"{piece.place(index)}: {rows.lengths[index]} tokens, more than {form.limit_option} = {form.limit}, and "
            "overflow is error; raise it, or choose overflow: truncate, drop or split"
        )
    largest, largest_row = _largest_id(rows)
    trained_before = _num_trained(rows.labels, rows.lengths)
    kept_lengths = rows.lengths
    if form.overflow == "truncate":
        kept_lengths = np.minimum(rows.lengths, form.limit)
    elif form.overflow == "drop":
        kept_lengths = np.where(long, 0, rows.lengths)
    fitted = _shorten(rows, kept_lengths) if (kept_lengths != rows.lengths).any() else rows

    num_parts = -(-kept_lengths // form.limit)  # 0 for empty rows, 1 for all others but the split ones
    row_of_document = np.repeat(np.arange(len(num_parts)), num_parts)
    part = np.arange(len(row_of_document)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    lengths = np.minimum(kept_lengths[row_of_document] - part * form.limit, form.limit)
    num_trained = _num_trained(fitted.labels, lengths)
    trained_after = np.bincount(row_of_document, weights=num_trained, minlength=len(num_parts))

    dropped = long & (form.overflow == "drop")
    untrained = (trained_after == 0) & ~dropped
    labels = fitted.labels
    if labels is not None and np.array_equal(labels, fitted.input_ids):
        labels = None
    counts = rows.counted + Counts(
        samples=len(rows.lengths),
        kept=int(np.count_nonzero(kept_lengths)),
        truncated=int(np.count_nonzero(long)) if form.overflow == "truncate" else 0,
        dropped=int(np.count_nonzero(dropped)),
        split=int(np.count_nonzero(long)) if form.overflow == "split" else 0,
        empty=int(np.count_nonzero(rows.lengths == 0)),
        untrained=int(np.count_nonzero(untrained)),
        untrained_by_overflow=int(np.count_nonzero(untrained & (trained_before > 0))),
        documents=len(lengths),
        tokens=int(lengths.sum()),
        trained_tokens=int(num_trained.sum()),
        lost_tokens=int((rows.lengths - kept_lengths).sum()),
        split_tokens=int(rows.lengths[long].sum()) if form.overflow == "split" else 0,
        all_trained=_count_all_trained(rows, trained_before, form.tokenizer),
    )
    return EncodedDocuments(
        fitted.input_ids,
        labels,
        fitted.extras,
        lengths,
        num_trained,
        counts,
        has_labels=rows.has_labels,
        largest_id=largest,
        largest_id_row=largest_row,
    )


def _count_all_trained(rows: Rows, num_trained: np.ndarray, tokenizer: TextTokenizer | None) -> int:
    """Counts the rows without any masked label, from their trained tokens [R].

    A row's first token is never trained: if it is a word and not BOS, it is a prompt of one token.
    """
    if rows.labels is None:
        return int(np.count_nonzero(rows.has_labels & (rows.lengths > 1)))
    whole = (rows.lengths > 1) & (num_trained == rows.lengths - 1)
    if tokenizer is not None:
        first = (np.cumsum(rows.lengths) - rows.lengths)[whole]
        special = np.isin(rows.input_ids[first], tokenizer.special_ids)
        return int(np.count_nonzero((rows.labels[first] != IGNORE) | special))
    return int(np.count_nonzero(whole))


def _largest_id(rows: Rows) -> tuple[int, int]:
    """The largest id among tokens and labels, and its row; -1 without any."""
    if not len(rows.input_ids):
        return -1, -1
    where = int(np.argmax(rows.input_ids))
    largest = int(rows.input_ids[where])
    if rows.labels is not None and rows.labels.max() > largest:
        where = int(np.argmax(rows.labels))
        largest = int(rows.labels[where])
    return largest, int(np.searchsorted(np.cumsum(rows.lengths), where, side="right"))


def _num_trained(labels: np.ndarray | None, lengths: np.ndarray) -> np.ndarray:
    """Trained tokens per document. A document's first token never counts: no token before it predicts it."""
    if labels is None:
        return np.maximum(lengths - 1, 0)
    trained = np.concatenate([np.zeros(1, np.int64), np.cumsum(labels != IGNORE)])
    ends = np.cumsum(lengths)
    return trained[ends] - trained[np.minimum(ends - lengths + 1, ends)]


def _shorten(rows: Rows, kept_lengths: np.ndarray) -> Rows:
    starts = np.cumsum(rows.lengths) - rows.lengths
    position = np.arange(len(rows.input_ids)) - np.repeat(starts, rows.lengths)
    keep = position < np.repeat(kept_lengths, rows.lengths)
    return replace(
        rows,
        input_ids=rows.input_ids[keep],
        labels=None if rows.labels is None else rows.labels[keep],
        extras={name: values[keep] for name, values in rows.extras.items()},
        lengths=kept_lengths,
    )
