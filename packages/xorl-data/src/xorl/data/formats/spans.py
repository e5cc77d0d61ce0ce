"""From texts with trained characters to token ids and labels: the whole text is tokenized once, spans map to tokens.

A token that lies on the border of a span, partly trained text and partly not, is trained and counted as straddling: at
a turn's beginning it is the first thing the model has to write, at its end it holds what ends the turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from tokenizers import Encoding

from xorl.data.batch import IGNORE
from xorl.data.errors import DataError
from xorl.data.formats.encoded import Rows
from xorl.data.formats.tokenizer import TextTokenizer
from xorl.data.readers import Piece
from xorl.data.receipt import Counts

# Encodings hold a string and two numbers for each token: a piece's rows are not all kept at once.
_BATCH_CHARS = 1 << 20


@dataclass(frozen=True)
class Text:
    """A sample before it is tokenized; `spans` are the trained characters, None: all of them."""

    text: str
    spans: tuple[tuple[int, int], ...] | None


def tokenize(texts: Sequence[Text], tokenizer: TextTokenizer, piece: Piece, counted: Counts) -> Rows:
    """Encodes the rows of a piece, without adding special tokens. DataError names a row that begins with two BOS."""
    ids: list[np.ndarray] = []
    trained: list[np.ndarray] = []
    lengths: list[int] = []
    num_straddling = 0
    for first, last in _batches(texts):
        batch = texts[first:last]
        try:
            encodings = tokenizer.core.encode_batch([text.text for text in batch], add_special_tokens=False)
        except TypeError:
            _check_unicode(batch, first, piece)
            raise
        sizes = [len(encoding) for encoding in encodings]
        flat = chain.from_iterable(encoding.ids for encoding in encodings)
        ids.append(np.fromiter(flat, dtype=np.int32, count=sum(sizes)))
        mask = np.zeros(sum(sizes), dtype=np.bool_)
        start = 0
        for text, encoding, size in zip(batch, encodings, sizes, strict=True):
            if text.spans is None:
                mask[start : start + size] = True
            for span in text.spans or ():
                low, high, straddling = _token_range(encoding, *span, len(text.text), size)
                mask[start + low : start + high] = True
                num_straddling += straddling
            start += size
        trained.append(mask)
        lengths += sizes
    has_labels = any(text.spans is not None for text in texts)
    input_ids = np.concatenate(ids) if ids else np.empty(0, np.int32)
    rows = Rows(
        input_ids=input_ids,
        labels=np.where(np.concatenate(trained), input_ids, np.int32(IGNORE)) if has_labels else None,
        extras={},
        lengths=np.array(lengths, dtype=np.int64),
        has_labels=has_labels,
        counted=counted + Counts(straddling_tokens=num_straddling),
    )
    _check_beginnings(rows, tokenizer, piece)
    return rows


def _check_unicode(texts: Sequence[Text], first: int, piece: Piece) -> None:
    """Raises DataError for half a character, which JSON can spell (\\ud83d) and no tokenizer takes."""
    for index, text in enumerate(texts, first):
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


def _token_range(encoding: Encoding, start: int, stop: int, num_chars: int, num_tokens: int) -> tuple[int, int, int]:
    """The tokens [low, high) that hold any of the characters [start, stop), and how many of them hold others too."""
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
    """The first token that holds `char`, or a later one where the tokenizer drops it, such as a trimmed space."""
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
