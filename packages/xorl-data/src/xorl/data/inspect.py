"""Shows documents as segments of text, each marked as trained or not, and as a special token or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from xorl.data.arguments import checked
from xorl.data.batch import IGNORE
from xorl.data.errors import DataError
from xorl.data.formats import TextTokenizer


@dataclass(frozen=True)
class TextSegment:
    """The text of consecutive tokens of the same kind. A `special` segment is one special token."""

    text: str
    trained: bool
    special: bool = False


@checked
def text_segments(ids: np.ndarray, labels: np.ndarray, tokenizer: TextTokenizer | None) -> list[TextSegment]:
    """A document [T] as text; without a tokenizer, as ids.

    `labels` are not shifted. The first token is never trained, since no token before it predicts it. Raises
    DataError for ids and labels of different shapes, and for others than integers.
    """
    for name, values in (("ids", ids), ("labels", labels)):
        if values.shape != (len(ids),) or values.dtype.kind not in "iu":
            raise DataError(f"{name}: {values.dtype} {list(values.shape)}, want integers [{len(ids)}], one a token")
    trained = labels != IGNORE
    if len(trained):
        trained[0] = False
    special = np.zeros(len(ids), dtype=bool) if tokenizer is None else np.isin(ids, tokenizer.special_ids)
    # Each special token is a separate segment; other consecutive tokens of the same kind are joined.
    starts = np.flatnonzero(
        np.concatenate([[True], (trained[1:] != trained[:-1]) | special[1:] | special[:-1]]) if len(ids) else []
    )
    ends = [*starts[1:].tolist(), len(ids)]
    return [
        TextSegment(_text(ids[start:end], tokenizer), bool(trained[start]), bool(special[start]))
        for start, end in zip(starts.tolist(), ends, strict=False)
    ]


def trained_texts(parts: list[TextSegment]) -> Iterator[str]:
    """Yields the trained text, one string per run of trained segments."""
    text = ""
    for part in parts:
        if part.trained:
            text += part.text
        elif text:
            yield text
            text = ""
    if text:
        yield text


def _text(ids: np.ndarray, tokenizer: TextTokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids.tolist())) + " "
    return tokenizer.core.decode(ids.tolist(), skip_special_tokens=False)
