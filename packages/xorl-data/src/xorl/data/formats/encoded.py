"""The Format protocol, its result EncodedDocuments, and the overflow policy that all formats share.

Array legend: T tokens of all documents on one axis, N documents, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from xorl.data.batch import IGNORE
from xorl.data.chunks import Chunk, Row, SomeRows
from xorl.data.errors import DataError
from xorl.data.formats.tokenizer import TextTokenizer
from xorl.data.hashing import JSON
from xorl.data.images.table import ImageTable
from xorl.data.receipt import Counts, Findings

# The maximum number of whitespace tokens that a template may write after the end token of a turn.
_MAX_SPACE_TOKENS = 2

Overflow = Literal["truncate", "drop", "split", "error"]


class Format(Protocol):
    """Converts the rows of one dataset entry to documents. Cheap to pickle, to be sent to worker processes.

    `limit` is the maximum document length in tokens, `limit_option` the option that sets it, for error messages.
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
        """The columns that the format reads, so that readers can skip others; None: the columns of token ids."""
        ...

    @property
    def extras(self) -> tuple[str, ...]:
        """The additional per-token columns of the documents."""
        ...

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """The tokenizer; None if rows are already tokenized."""
        ...

    @property
    def masks_prompts(self) -> bool:
        """Whether only the answer in each sample is to be trained."""
        ...

    @property
    def uses_current_date(self) -> bool:
        """Whether the documents contain the current date, because the chat template writes it."""
        ...

    def fingerprint(self) -> dict[str, JSON]:
        """The options and files that determine the documents, apart from the samples; part of the cache key."""
        ...

    def encode(self, chunk: Chunk) -> EncodedDocuments:
        """The documents of a chunk, in order. Raises DataError, with file and row, for an unusable row."""
        ...


@dataclass(frozen=True)
class EncodedDocuments:
    """The documents of one chunk. With `labels` None, the labels equal the ids."""

    input_ids: np.ndarray  # [T] int32
    labels: np.ndarray | None  # [T] int32, IGNORE where not trained
    extras: dict[str, np.ndarray]  # each [T] float32
    lengths: np.ndarray  # [N] int64
    num_trained: np.ndarray  # [N] int64
    counts: Counts
    has_labels: bool
    largest_id: int
    largest_id_row: int
    findings: Findings = field(default_factory=Findings)
    images: ImageTable = field(default_factory=ImageTable.empty)


@dataclass(frozen=True)
class EncodedRows:
    """Concatenated rows before the overflow policy; `lengths` [R]. `counts` are the counts specific to the format.

    The documents of `images` are the rows.
    """

    input_ids: np.ndarray
    labels: np.ndarray | None
    extras: dict[str, np.ndarray]
    lengths: np.ndarray
    has_labels: bool
    counts: Counts = field(default_factory=Counts)
    findings: Findings = field(default_factory=Findings)
    images: ImageTable = field(default_factory=ImageTable.empty)


def id_problem(offender: int, name: str, vocab_size: int | None) -> str:
    """The error message for an id outside the vocabulary."""
    if offender < 0:
        hint = f" (mark labels that are not trained with {IGNORE})" if name == "labels" else ""
        return f"{name} contains the negative id {offender}{hint}"
    if vocab_size is None:
        return f"{name} contains the id {offender}, which exceeds 32 bits"
    return (
        f"{name} contains the id {offender}, but the model's vocab_size is {vocab_size}, so the largest id is "
        f"{vocab_size - 1}; check that the data was tokenized with the model's tokenizer"
    )


def encode_usable(
    chunk: Chunk, encode: Callable[[Chunk], EncodedRows], *, skip_bad_rows: bool
) -> tuple[EncodedRows, Chunk]:
    """Encodes the rows of a chunk; with `skip_bad_rows`, only usable rows. Returns them and their chunk.

    Raises DataError for a row that cannot be used, or for rows that are inconsistent with each other.
    """
    if not skip_bad_rows:
        if chunk.problems:
            raise DataError(chunk.problems[0])
        return encode(chunk), chunk
    problems, usable = [*chunk.problems], chunk
    try:
        rows = encode(chunk)
    except DataError:
        kept: list[tuple[int, Row]] = []
        names = chunk.names()
        for index, row in enumerate(chunk.read()):
            try:
                if isinstance(row, DataError):
                    raise row
                encode(SomeRows(chunk, [index], [row], names))
                kept.append((index, row))
            except DataError as error:
                problems.append(str(error))
        usable = SomeRows(chunk, [index for index, _ in kept], [row for _, row in kept], names)
        rows = encode(usable)
    num = len(problems)
    findings = rows.findings + Findings(problems=tuple(problems))
    return replace(rows, counts=rows.counts + Counts(samples=num, skipped=num), findings=findings), usable


def _end_tokens(rows: EncodedRows, tokenizer: TextTokenizer | None) -> dict[str, int]:
    """The special tokens at the end of each run of trained tokens, apart from whitespace after them, and their counts.

    These are the tokens with which the model learns to end its text.
    """
    if tokenizer is None or not len(rows.input_ids):
        return {}
    is_end = np.zeros(len(rows.input_ids), np.bool_)
    is_end[np.cumsum(rows.lengths)[rows.lengths > 0] - 1] = True
    if rows.labels is not None:
        trained = rows.labels != IGNORE
        is_end[:-1] |= ~trained[1:]
        is_end &= trained
    ends = np.flatnonzero(is_end)
    special = np.array(tokenizer.special_ids, dtype=np.int64)
    tokens: dict[str, int] = {}
    for _ in range(_MAX_SPACE_TOKENS + 1):
        ids = rows.input_ids[ends]
        found = np.isin(ids, special)
        for token_id, number in zip(*np.unique(ids[found], return_counts=True), strict=True):
            text = str(tokenizer.core.id_to_token(int(token_id)))
            tokens[text] = tokens.get(text, 0) + int(number)
        spaces = [token_id for token_id in np.unique(ids[~found]).tolist() if tokenizer.is_space(token_id)]
        ends = ends[np.isin(ids, spaces)] - 1
        ends = ends[ends >= 0]
    return tokens


def apply_overflow(rows: EncodedRows, chunk: Chunk, fmt: Format) -> EncodedDocuments:
    """Applies the overflow policy: rows [R] to documents [N]."""
    long = rows.lengths > fmt.limit
    if fmt.overflow == "error" and long.any():
        index = int(np.argmax(long))
        raise DataError(
            f"{chunk.location(index)}: {rows.lengths[index]} tokens, more than {fmt.limit_option} = {fmt.limit}, and "
            f"overflow is error; raise {fmt.limit_option}, or choose another overflow, such as drop"
        )
    largest, largest_row = _largest_id(rows)
    trained_before = _num_trained(rows.labels, rows.lengths)
    kept_lengths = rows.lengths
    if fmt.overflow == "truncate":
        kept_lengths = _before_cut_images(rows, np.minimum(rows.lengths, fmt.limit))
    elif fmt.overflow == "drop":
        kept_lengths = np.where(long, 0, rows.lengths)
    elif fmt.overflow == "split":
        _check_not_split(rows, long, chunk, fmt)
    fitted = _shorten(rows, kept_lengths) if (kept_lengths != rows.lengths).any() else rows

    num_parts = -(-kept_lengths // fmt.limit)  # 0 for empty rows, more than 1 for split rows, 1 for all others
    row_of_document = np.repeat(np.arange(len(num_parts)), num_parts)
    part = np.arange(len(row_of_document)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    lengths = np.minimum(kept_lengths[row_of_document] - part * fmt.limit, fmt.limit)
    num_trained = _num_trained(fitted.labels, lengths)
    trained_after = np.bincount(row_of_document, weights=num_trained, minlength=len(num_parts))

    dropped = long & (fmt.overflow == "drop")
    untrained = (trained_after == 0) & ~dropped
    labels = fitted.labels
    if labels is not None and np.array_equal(labels, fitted.input_ids):
        labels = None
    images, stops = rows.images, rows.images.records["start"] + rows.images.records["tokens"]
    row_of_image = images.records["document"]
    is_kept = stops <= kept_lengths[row_of_image]
    first_document = np.cumsum(num_parts) - num_parts
    findings = rows.findings + Findings(end_tokens=_end_tokens(rows, fmt.tokenizer))
    counts = rows.counts + Counts(
        samples=len(rows.lengths),
        kept=int(np.count_nonzero(kept_lengths)),
        truncated=int(np.count_nonzero(long)) if fmt.overflow == "truncate" else 0,
        dropped=int(np.count_nonzero(dropped)),
        split=int(np.count_nonzero(long)) if fmt.overflow == "split" else 0,
        empty=int(np.count_nonzero(rows.lengths == 0)),
        untrained=int(np.count_nonzero(untrained)),
        untrained_by_overflow=int(np.count_nonzero(untrained & (trained_before > 0))),
        documents=len(lengths),
        tokens=int(lengths.sum()),
        trained_tokens=int(num_trained.sum()),
        lost_tokens=int((rows.lengths - kept_lengths).sum()),
        split_tokens=int(rows.lengths[long].sum()) if fmt.overflow == "split" else 0,
        all_trained=_count_all_trained(rows, trained_before, fmt.tokenizer),
        cut_images=int(np.count_nonzero(~is_kept)),
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
        findings=findings,
        images=images.keep(is_kept, first_document[row_of_image]),
    )


def _before_cut_images(rows: EncodedRows, kept_lengths: np.ndarray) -> np.ndarray:
    """`kept_lengths` [R], smaller where a row would end within an image: it then ends before it."""
    records = rows.images.records
    of_row, stops = records["document"], records["start"] + records["tokens"]
    is_cut = (records["start"] < kept_lengths[of_row]) & (stops > kept_lengths[of_row])
    kept_lengths[of_row[is_cut]] = records["start"][is_cut]
    return kept_lengths


def _check_not_split(rows: EncodedRows, long: np.ndarray, chunk: Chunk, fmt: Format) -> None:
    """Raises DataError for a long row with images, of which a part would lack what the other shows."""
    with_images = rows.images.records["document"][long[rows.images.records["document"]]]
    if len(with_images):
        index = int(with_images[0])
        raise DataError(
            f"{chunk.location(index)}: {rows.lengths[index]} tokens with images, more than {fmt.limit_option} = "
            f"{fmt.limit}, and samples with images are not split; set overflow to truncate or drop"
        )


def _count_all_trained(rows: EncodedRows, num_trained: np.ndarray, tokenizer: TextTokenizer | None) -> int:
    """Counts the rows without masked labels; `num_trained` [R] are their trained tokens.

    The first token of a row is never trained. If it is masked and not a special token, it is a prompt of one token.
    """
    if rows.labels is None:
        return int(np.count_nonzero(rows.has_labels & (rows.lengths > 1)))
    whole = (rows.lengths > 1) & (num_trained == rows.lengths - 1)
    if tokenizer is not None:
        first = (np.cumsum(rows.lengths) - rows.lengths)[whole]
        special = np.isin(rows.input_ids[first], tokenizer.special_ids)
        return int(np.count_nonzero((rows.labels[first] != IGNORE) | special))
    return int(np.count_nonzero(whole))


def _largest_id(rows: EncodedRows) -> tuple[int, int]:
    """The largest id among tokens and labels, and its row; -1, -1 without tokens."""
    if not len(rows.input_ids):
        return -1, -1
    position = int(np.argmax(rows.input_ids))
    largest = int(rows.input_ids[position])
    if rows.labels is not None and rows.labels.max() > largest:
        position = int(np.argmax(rows.labels))
        largest = int(rows.labels[position])
    return largest, int(np.searchsorted(np.cumsum(rows.lengths), position, side="right"))


def _num_trained(labels: np.ndarray | None, lengths: np.ndarray) -> np.ndarray:
    """Trained tokens per document. The first token of a document never counts, since no token before it predicts it."""
    if labels is None:
        return np.maximum(lengths - 1, 0)
    trained, is_full = labels != IGNORE, lengths > 0
    starts = (np.cumsum(lengths) - lengths)[is_full]
    trained[starts] = False
    counts = np.zeros(len(lengths), np.int64)
    if len(starts):
        counts[is_full] = np.add.reduceat(trained, starts, dtype=np.int64)
    return counts


def _shorten(rows: EncodedRows, kept_lengths: np.ndarray) -> EncodedRows:
    pieces = np.stack([kept_lengths, rows.lengths - kept_lengths], axis=1)
    keep = np.repeat(np.tile([True, False], len(rows.lengths)), pieces.ravel())
    return replace(
        rows,
        input_ids=rows.input_ids[keep],
        labels=None if rows.labels is None else rows.labels[keep],
        extras={name: values[keep] for name, values in rows.extras.items()},
        lengths=kept_lengths,
    )
