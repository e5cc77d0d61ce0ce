"""Recognising the kind of a dataset by its columns, for `type: auto`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from xorl.data.errors import DataError
from xorl.data.formats.completion import SHAPES
from xorl.data.formats.messages import COLUMN_NAMES

FormatName = Literal["tokenized", "chat", "prompt_completion", "text"]


def recognise(columns: Iterable[str]) -> FormatName:
    """The format for these column names. DataError, without a place, if none matches."""
    names = set(columns)
    if "input_ids" in names:
        return "tokenized"
    if names & set(COLUMN_NAMES):
        return "chat"
    if any({parts[0], answer} <= names for parts, answer in SHAPES):
        return "prompt_completion"
    if "text" in names:
        return "text"
    raise DataError(
        f"the columns {', '.join(sorted(names)) or '(none)'} are not known: want input_ids, messages or conversations, "
        "prompt and completion, instruction and output, question and answer, or text. Set type, and name the columns"
    )
