"""Converts texts with trained characters to token ids and labels: tokenizes the whole text once, maps spans to tokens.

A token that crosses the border of a span, with both trained and untrained text, is trained and counted as straddling:
at a turn's beginning it is the first token the model has to write, at its end it contains the turn's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
from tokenizers import Encoding

from xorl.data.batch import IGNORE
from xorl.data.errors import DataError
from xorl.data.formats.encoded import Rows
from xorl.data.formats.tokenizer import TextTokenizer
from xorl.data.readers import Piece
from xorl.data.receipt import Counts

# An encoding holds a string and two numbers per token: do not keep those of all rows of a piece at once.
_BATCH_CHARS = 1 << 20


@dataclass(frozen=True)
class Text:
    """A sample before it is tokenized; `spans` are the trained characters, None: all of them."""

    text: str
    spans: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True)
class _Encoded:
    """Texts as tokens [T]; a token is marked if it holds any trained character."""

    ids: np.ndarray  # [T] int32
    trained: np.ndarray  # [T] bool
    lengths: list[int]
    num_straddling: int


def tokenize(texts: Sequence[Text], tokenizer: TextTokenizer, piece: Piece, counted: Counts) -> Rows:
    """Encodes the rows of a piece, without adding special tokens. DataError names a row that begins with two BOS."""
    try:
        encoded = [_encode(texts[first:last], tokenizer) for first, last in _batches(texts)]
    except TypeError:
        _check_unicode(texts, piece)
        raise
    has_labels = any(text.spans is not None for text in texts)
    input_ids = np.concatenate([np.empty(0, np.int32), *(batch.ids for batch in encoded)])
    labels = None
    if has_labels:
        labels = np.where(np.concatenate([batch.trained for batch in encoded]), input_ids, np.int32(IGNORE))
    rows = Rows(
        input_ids=input_ids,
        labels=labels,
        extras={},
        lengths=np.array([length for batch in encoded for length in batch.lengths], dtype=np.int64),
        has_labels=has_labels,
        counted=counted + Counts(straddling_tokens=sum(batch.num_straddling for batch in encoded)),
    )
    _check_beginnings(rows, tokenizer, piece)
    return rows


def _check_unicode(texts: Sequence[Text], piece: Piece) -> None:
    """Raises DataError for a lone surrogate, which JSON can spell (\\ud83d) and no tokenizer accepts."""
    for index, text in enumerate(texts):
        try:
            text.text.encode()
        except UnicodeEncodeError as error:
            around = text.text[max(0, error.start - 20) : error.start]
            raise DataError(
                f"{piece.place(index)}: the text holds half a character, U+{ord(text.text[error.start]):04X}, after "
                f"{around!r}: it was cut in two where it was written; mend it or take it out"
            ) from error


def _check_beginnings(rows: Rows, tokenizer: TextTokenizer, piece: Piece) -> None:
    starts = (np.cumsum(rows.lengths) - rows.lengths)[rows.lengths > 1]
    if tokenizer.bos_id is None:
        return
    doubled = (rows.input_ids[starts] == tokenizer.bos_id) & (rows.input_ids[starts + 1] == tokenizer.bos_id)
    if doubled.any():
        row = int(np.flatnonzero(rows.lengths > 1)[np.argmax(doubled)])
        raise DataError(
            f"{piece.place(row)}: the text begins with two {tokenizer.special['bos_token']} (BOS) tokens; take one out "
            "of the chat template or of the data"
        )


def _encode(texts: Sequence[Text], tokenizer: TextTokenizer) -> _Encoded:
    """Encodes texts. If a text is its tokens' bytes, their lengths give the positions, else the tokenizer's offsets do.

    Computing offsets takes a sixth of the tokenizer's time.
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
    spans: list[tuple[int, int]] = []  # by byte, in all texts together
    ranges: list[tuple[int, int]] = []  # by token
    num_straddling = 0
    for text, row, encoding, start in zip(texts, rows, encodings, starts, strict=False):
        if text.spans is None:
            ranges.append((start, start + len(row)))
        elif bytes_of is not None and b"".join([bytes_of[token] for token in row]) == text.text.encode():
            first = int(ends[start - 1]) if start else 0
            spans += [(first + _num_bytes(text.text, a), first + _num_bytes(text.text, b)) for a, b in text.spans]
        else:
            placed = encoding if needs_offsets else core.encode(text.text, add_special_tokens=False)
            for span in text.spans:
                low, high, straddling = _token_range(placed, *span, len(text.text), len(row))
                ranges.append((start + low, start + high))
                num_straddling += straddling
    if spans:
        low, high, straddling = _ranges_of_bytes(np.array(spans), ends)
        ranges += zip(low.tolist(), high.tolist(), strict=True)
        num_straddling += straddling
    trained = np.zeros(len(ids), dtype=np.bool_)
    for low, high in ranges:
        trained[low:high] = True
    return _Encoded(ids, trained, lengths, num_straddling)


def _num_bytes(text: str, num_chars: int) -> int:
    return num_chars if text.isascii() else len(text[:num_chars].encode())


def _ranges_of_bytes(spans: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """The tokens [low, high) that hold any byte of each span [S, 2], and how many of them also hold bytes outside it.

    `ends` [T] is where each token ends.
    """
    begins = np.concatenate([np.zeros(1, ends.dtype), ends])
    low, high = np.searchsorted(ends, spans[:, 0], side="right"), np.searchsorted(ends, spans[:, 1], side="right")
    cut_low, cut_high = begins[low] < spans[:, 0], begins[high] < spans[:, 1]
    return low, high + cut_high, int(cut_low.sum() + cut_high.sum())


def _token_range(encoding: Encoding, start: int, stop: int, num_chars: int, num_tokens: int) -> tuple[int, int, int]:
    """The tokens [low, high) that hold any of the characters [start, stop), and how many of them also hold others."""
    low = _token_at(encoding, start, num_chars, num_tokens)
    high = _token_at(encoding, stop, num_chars, num_tokens)
    straddling = 0
    if low < num_tokens and (chars := encoding.token_to_chars(low)) is not None and chars[0] < start < chars[1]:
        straddling += 1
    if high < num_tokens and (chars := encoding.token_to_chars(high)) is not None and chars[0] < stop < chars[1]:
        high += 1
        straddling += 1
    return low, high, straddling


def _token_at(encoding: Encoding, char: int, num_chars: int, num_tokens: int) -> int:
    """The first token that holds `char`, or a later one if the tokenizer drops it, such as a trimmed space."""
    for place in range(char, num_chars):
        token = encoding.char_to_token(place)
        if token is not None:
            return token
    return num_tokens


def _batches(texts: Sequence[Text]) -> list[tuple[int, int]]:
    """Consecutive ranges of rows of about _BATCH_CHARS characters each."""
    ranges, first, size = [], 0, 0
    for number, text in enumerate(texts):
        size += len(text.text)
        if size >= _BATCH_CHARS:
            ranges.append((first, number + 1))
            first, size = number + 1, 0
    return [*ranges, (first, len(texts))] if first < len(texts) else ranges
