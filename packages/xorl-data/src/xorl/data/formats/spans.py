"""Tokenizes texts, each once as a whole, and maps the spans of trained characters to labels.

A token that crosses the boundary of a span, and so has both trained and untrained text, is trained and counted as
straddling. At the start of a turn, it is the first token that the model generates; at the end, it holds the last text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

import numpy as np

from xorl.data.batch import IGNORE
from xorl.data.chunks import Chunk
from xorl.data.errors import DataError
from xorl.data.formats.encoded import EncodedRows
from xorl.data.formats.tokenizer import TextTokenizer
from xorl.data.formats.windows import encode_in_windows
from xorl.data.images.source import ImageSource
from xorl.data.receipt import Counts

# Encodings have a string and two numbers per token, so those of a whole chunk are not kept at once.
_BATCH_CHARS = 1 << 20


_PART = 1 << 16  # tokens whose bytes are compared at a time
_NO_IDS = np.empty(0, np.int32)

Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """The text of a row; `spans` are the trained characters, None: all.

    `num_unended` is the number of trained turns without an end token. `lacks_reasoning`: the conversation has
    reasoning, but the text contains none of it. `images` are those of the placeholders in the text, in order.
    `rejected`: of a pair, the text of the rejected answer; this is then that of the chosen one.
    """

    text: str
    spans: tuple[Span, ...] | None
    num_unended: int = 0
    lacks_reasoning: bool = field(default=False, compare=False)
    images: tuple[ImageSource, ...] = ()
    rejected: Rendered | None = None


@dataclass(frozen=True)
class _Encoded:
    """Tokenized texts; a token is `trained` if it contains any trained character."""

    ids: np.ndarray  # [T] int32
    trained: np.ndarray  # [T] bool
    lengths: list[int]
    num_straddling: int


def tokenize(texts: Sequence[Rendered], tokenizer: TextTokenizer, chunk: Chunk) -> EncodedRows:
    """Tokenizes the rows of a chunk without adding special tokens. Raises DataError if a row begins with two BOS."""
    try:
        encoded = [
            _encode_long(texts[first], tokenizer) if _is_long(texts[first]) else _encode(texts[first:last], tokenizer)
            for first, last in _batches(texts)
        ]
    except TypeError:
        _check_unicode(texts, chunk)
        raise
    has_labels = any(text.spans is not None for text in texts)
    # A long row is not copied.
    input_ids = encoded[0].ids if len(encoded) == 1 else np.concatenate([_NO_IDS, *(batch.ids for batch in encoded)])
    labels = None
    if has_labels:
        labels = np.where(np.concatenate([batch.trained for batch in encoded]), input_ids, np.int32(IGNORE))
    rows = EncodedRows(
        input_ids=input_ids,
        labels=labels,
        extras={},
        lengths=np.array([length for batch in encoded for length in batch.lengths], dtype=np.int64),
        has_labels=has_labels,
        counts=Counts(
            straddling_tokens=sum(batch.num_straddling for batch in encoded),
            unended_turns=sum(text.num_unended for text in texts),
            unwritten_reasoning=sum(text.lacks_reasoning for text in texts),
        ),
    )
    _check_beginnings(rows, tokenizer, chunk)
    return rows


def _check_unicode(texts: Sequence[Rendered], chunk: Chunk) -> None:
    """Raises DataError for a lone surrogate, which JSON can contain (\\ud83d) and no tokenizer accepts."""
    for index, text in enumerate(texts):
        try:
            text.text.encode()
        except UnicodeEncodeError as error:
            before = text.text[max(0, error.start - 20) : error.start]
            raise DataError(
                f"{chunk.location(index)}: the text has half a character, the surrogate "
                f"U+{ord(text.text[error.start]):04X}, after {before!r}; fix or remove it"
            ) from error


def _check_beginnings(rows: EncodedRows, tokenizer: TextTokenizer, chunk: Chunk) -> None:
    starts = (np.cumsum(rows.lengths) - rows.lengths)[rows.lengths > 1]
    if tokenizer.bos_id is None:
        return
    doubled = (rows.input_ids[starts] == tokenizer.bos_id) & (rows.input_ids[starts + 1] == tokenizer.bos_id)
    if doubled.any():
        row = int(np.flatnonzero(rows.lengths > 1)[np.argmax(doubled)])
        raise DataError(
            f"{chunk.location(row)}: the text begins with two {tokenizer.special['bos_token']} (BOS) tokens; remove "
            "one from the chat template or from the data"
        )


def _encode(texts: Sequence[Rendered], tokenizer: TextTokenizer) -> _Encoded:
    """Tokenizes texts and maps their spans to tokens.

    If the bytes of the tokens add up to the text, their lengths give the token positions; otherwise the tokenizer's
    offsets do. Computing offsets takes a sixth of the tokenizer's time.
    """
    core, bytes_of = tokenizer.core, tokenizer.bytes_of
    needs_offsets = bytes_of is None and any(text.spans is not None for text in texts)
    encode_batch = core.encode_batch if needs_offsets else core.encode_batch_fast
    encodings = encode_batch([text.text for text in texts], add_special_tokens=False)
    rows = [encoding.ids for encoding in encodings]
    lengths = [len(row) for row in rows]
    ids = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=sum(lengths))
    starts = list(accumulate(lengths, initial=0))
    ends = np.cumsum(tokenizer.num_bytes_of[ids]) if bytes_of is not None else np.empty(0, np.int64)
    spans: list[Span] = []  # in bytes of all texts concatenated
    ranges: list[Span] = []  # in tokens
    num_straddling = 0
    for text, row, encoding, start in zip(texts, rows, encodings, starts, strict=False):
        if text.spans is None:
            ranges.append((start, start + len(row)))
        elif bytes_of is not None and b"".join([bytes_of[token] for token in row]) == text.text.encode():
            first = int(ends[start - 1]) if start else 0
            spans += [(first + a, first + b) for a, b in _in_bytes(text.text, text.spans)]
        else:
            with_offsets = encoding if needs_offsets else core.encode(text.text, add_special_tokens=False)
            if row and text.spans:
                offsets = np.array(with_offsets.offsets)
                low, high, straddling = _ranges(np.array(text.spans), offsets[:, 1], offsets[:, 0])
                ranges += zip((start + low).tolist(), (start + high).tolist(), strict=True)
                num_straddling += straddling
    if spans:
        low, high, straddling = _ranges(np.array(spans), ends)
        ranges += zip(low.tolist(), high.tolist(), strict=True)
        num_straddling += straddling
    trained = np.zeros(len(ids), dtype=np.bool_)
    for low, high in ranges:
        trained[low:high] = True
    return _Encoded(ids, trained, lengths, num_straddling)


def _is_long(text: Rendered) -> bool:
    return len(text.text) >= _BATCH_CHARS


def _encode_long(text: Rendered, tokenizer: TextTokenizer) -> _Encoded:
    """`_encode` for one text, in memory of a few times its size."""
    ids, starts, ends = encode_in_windows(text.text, tokenizer.core, with_offsets=False)
    trained = np.full(len(ids), text.spans is None)
    num_straddling = 0
    if text.spans:
        if tokenizer.bytes_of is not None and _spells(ids, tokenizer.bytes_of, text.text):
            spans = np.array(_in_bytes(text.text, text.spans))
            ends = tokenizer.num_bytes_of.astype(np.int32)[ids]
            np.cumsum(ends, out=ends)
            starts = None
        else:
            spans = np.array(text.spans)
            ids, starts, ends = encode_in_windows(text.text, tokenizer.core, with_offsets=True)
        low, high, num_straddling = _ranges(spans, ends, starts)
        for first, last in zip(low.tolist(), high.tolist(), strict=True):
            trained[first:last] = True
    return _Encoded(ids, trained, [len(ids)], num_straddling)


def _spells(ids: np.ndarray, bytes_of: Sequence[bytes], text: str) -> bool:
    """Whether the bytes of the tokens add up to the text; compared in parts, which take less memory."""
    expected, position = text.encode(), 0
    for first in range(0, len(ids), _PART):
        part = b"".join([bytes_of[token] for token in ids[first : first + _PART].tolist()])
        if not expected.startswith(part, position):
            return False
        position += len(part)
    return position == len(expected)


def _in_bytes(text: str, spans: Sequence[Span]) -> list[Span]:
    """Spans of characters, in order, as spans of bytes."""
    if text.isascii():
        return [*spans]
    found: list[Span] = []
    char = num_bytes = 0
    for start, stop in spans:
        first = num_bytes + len(text[char:start].encode())
        char, num_bytes = stop, first + len(text[start:stop].encode())
        found.append((first, num_bytes))
    return found


def _ranges(
    spans: np.ndarray, ends: np.ndarray, starts: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """The tokens [low, high) that contain any of each span [S, 2], and how many also contain something outside it.

    `starts` and `ends` [T] are the offsets of the tokens, in the unit of the spans. Without `starts`, each token starts
    where the one before it ends.
    """

    def start_of(tokens: np.ndarray) -> np.ndarray:
        if starts is None:
            return np.where(tokens > 0, ends[tokens - 1], 0)
        return np.where(tokens < len(starts), starts[np.minimum(tokens, len(starts) - 1)], ends[-1])

    low, high = np.searchsorted(ends, spans[:, 0], side="right"), np.searchsorted(ends, spans[:, 1], side="right")
    cut_low, cut_high = start_of(low) < spans[:, 0], start_of(high) < spans[:, 1]
    return low, high + cut_high, int(cut_low.sum() + cut_high.sum())


def _batches(texts: Sequence[Rendered]) -> list[tuple[int, int]]:
    """Consecutive ranges of rows of about _BATCH_CHARS characters each; a longer row is a range by itself."""
    ranges, first, size = [], 0, 0
    for number, text in enumerate(texts):
        if _is_long(text) and first < number:
            ranges.append((first, number))
            first, size = number, 0
        size += len(text.text)
        if size >= _BATCH_CHARS:
            ranges.append((first, number + 1))
            first, size = number + 1, 0
    return [*ranges, (first, len(texts))] if first < len(texts) else ranges
