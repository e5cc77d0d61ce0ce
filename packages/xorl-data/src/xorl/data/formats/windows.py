"""Tokenizes a long text in overlapping windows, in memory that does not grow with its length.

The tokenizer's result for a whole text takes hundreds of bytes per token. How a text is cut only matters near the cut:
where two windows overlap, their tokens soon agree, and the windows are joined in the middle of a long run of equal
tokens. Texts without such a run, such as one endless word, get a wider overlap, up to the whole text.

T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

WINDOW_CHARS = 1 << 16
OVERLAP_CHARS = 1 << 12
# Equal tokens in a row that show that both windows read the text alike. Tokens of real text agree after a few.
_AGREEING = 64
_CANDIDATES = 256  # places in an overlap at which a run is looked for


class Tokens(NamedTuple):
    """The tokens of a text: ids [T] int32, and the characters [start, end) of each, [T] int32 (or [0]: not known)."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def between(self, first: int, last: int) -> Tokens:
        """The tokens [first, last)."""
        return Tokens(*(part[first:last] for part in self))


def encode_in_windows(
    text: str,
    core: Tokenizer,
    *,
    with_offsets: bool,
    window_chars: int = WINDOW_CHARS,
    overlap_chars: int = OVERLAP_CHARS,
) -> Tokens:
    """The tokens of `text` without added special tokens, as the tokenizer would return for the whole text."""
    num_chars = len(text)
    # Joining a list of arrays would hold the tokens twice.
    found = [bytearray() for _ in range(3 if with_offsets else 1)]

    def keep(part: Tokens) -> None:
        for buffer, values in zip(found, part, strict=False):
            buffer.extend(values.tobytes())

    overlap = overlap_chars
    # The window `tokens` covers the characters [start, stop); its tokens before `lead` belong to the window before it.
    start, stop, lead = 0, min(window_chars + overlap, num_chars), 0
    tokens = _encode(text, core, start, stop)
    while stop < num_chars:
        next_start = stop - overlap
        next_stop = min(next_start + window_chars + overlap_chars, num_chars)
        following = _encode(text, core, next_start, next_stop)
        joint = _joint(tokens, following, next_start)
        if joint is None or joint[0] < lead:
            overlap *= 2
            stop = min(start + window_chars + overlap, num_chars)
            tokens = _encode(text, core, start, stop)
            continue
        keep(tokens.between(lead, joint[0]))
        tokens, lead, start, stop, overlap = following, joint[1], next_start, next_stop, overlap_chars
    keep(tokens.between(lead, len(tokens.ids)))
    arrays = [np.frombuffer(buffer, dtype=np.int32) for buffer in found]
    return Tokens(*arrays, *[np.empty(0, np.int32)] * (3 - len(arrays)))


def _encode(text: str, core: Tokenizer, start: int, stop: int) -> Tokens:
    encoding = core.encode(text[start:stop], add_special_tokens=False)
    offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2) + np.int32(start)
    return Tokens(np.array(encoding.ids, dtype=np.int32), offsets[:, 0], offsets[:, 1])


def _joint(first: Tokens, second: Tokens, start: int) -> tuple[int, int] | None:
    """The same token in two windows, inside a run of equal tokens: its index in each; None if there is no such run.

    `start` is the first character of the second window.
    """
    low, high = int(np.searchsorted(first.starts, start)), len(first.ids) - _AGREEING
    middle = (low + high) // 2
    candidates = sorted(range(low, high, max(1, (high - low) // _CANDIDATES)), key=lambda index: abs(index - middle))
    for index in candidates:
        other = int(np.searchsorted(second.starts, first.starts[index]))
        run, twin = first.between(index, index + _AGREEING), second.between(other, other + _AGREEING)
        if all(np.array_equal(one, two) for one, two in zip(run, twin, strict=True)):
            return index + _AGREEING // 2, other + _AGREEING // 2
    return None
