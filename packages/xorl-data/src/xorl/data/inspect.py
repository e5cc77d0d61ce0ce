"""Inspecting documents: their tokens as stretches of text, trained or not, special or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from xorl.data.batch import IGNORE
from xorl.data.formats import TextTokenizer


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of one kind as text. `special` stretches hold one special token."""

    text: str
    trained: bool
    special: bool = False


def stretches(ids: np.ndarray, labels: np.ndarray, tokenizer: TextTokenizer | None) -> list[Stretch]:
    """A document [T] as text; without a tokenizer, as ids.

    Labels are not shifted: a trained token is predicted from those before it, so the first token never is trained.
    """
    trained = labels != IGNORE
    if len(trained):
        trained[0] = False
    special = np.zeros(len(ids), dtype=bool) if tokenizer is None else np.isin(ids, tokenizer.special_ids)
    # A special token stands alone; consecutive tokens of one kind are joined.
    starts = np.flatnonzero(
        np.concatenate([[True], (trained[1:] != trained[:-1]) | special[1:] | special[:-1]]) if len(ids) else []
    )
    ends = [*starts[1:].tolist(), len(ids)]
    return [
        Stretch(_text(ids[start:end], tokenizer), bool(trained[start]), bool(special[start]))
        for start, end in zip(starts.tolist(), ends, strict=False)
    ]


def trained_texts(parts: list[Stretch]) -> Iterator[str]:
    """Only the trained text, one string for each run of it."""
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
