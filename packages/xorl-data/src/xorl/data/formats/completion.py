"""The prompt_completion format: concatenates prompt and answer columns, and trains on the answer."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Literal

from xorl.data.chunks import Row
from xorl.data.errors import DataError
from xorl.data.formats.spans import Rendered
from xorl.data.formats.text import RenderedFormat
from xorl.data.hashing import JSON

CompletionTarget = Literal["completion", "all"]
# The columns of the prompt, in order, and the column of the answer. `input` may be missing or empty.
COLUMN_SETS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("prompt",), "completion"),
    (("instruction", "input"), "output"),
    (("question",), "answer"),
)
_OPTIONAL = ("input", "system")
# Columns whose text precedes the prompt: the system message, and earlier pairs of prompt and answer.
CONTEXT_COLUMNS = ("system", "history")
# Put between the parts, except between prompt and completion: a completion continues the prompt directly.
_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class PromptCompletionFormat(RenderedFormat):
    """Rows of prompt and completion, of instruction, input and output, or of question and answer.

    A completion follows its prompt directly; the other columns are separated by blank lines. The columns system and
    history, if they exist, come before the prompt. The text ends with one EOS, which is trained, and begins with BOS if
    the tokenizer itself would add one.
    """

    train_on: CompletionTarget = "completion"

    type_name: ClassVar[str] = "prompt_completion"

    @property
    def selected(self) -> tuple[str, ...]:
        # If one of these is missing, the reader returns all columns, so a column of another set is never skipped.
        parts, answer = self._renamed_columns() or COLUMN_SETS[0]
        context = [name for name in CONTEXT_COLUMNS if name in self.columns]
        return tuple(self.columns.get(name, name) for name in (*context, *parts, answer))

    @property
    def masks_prompts(self) -> bool:
        return self.train_on != "all"

    def fingerprint(self) -> dict[str, JSON]:
        return {**super().fingerprint(), "train_on": self.train_on}

    def used_columns(self, row: Row) -> frozenset[str]:
        parts, answer = self._renamed_columns() or _columns_of(row)
        return frozenset(self.columns.get(name, name) for name in (*CONTEXT_COLUMNS, *parts, answer))

    def render(self, row: Row) -> Rendered:
        parts, answer = self._renamed_columns() or _columns_of(row)
        context = [self._value(row, "system"), *self._history(row)]
        values = [*context, *(self._value(row, name) for name in (*parts, answer))]
        prompt = _SEPARATOR.join(value for value in values[:-1] if value)
        if answer != "completion" and prompt:
            prompt += _SEPARATOR
        if not values[-1]:
            raise DataError(
                f"column {self.columns.get(answer, answer)!r} is empty, so there is nothing to train on; remove the row"
            )
        begin = self.tokenizer.begin_of(prompt or values[-1])
        text = f"{begin}{prompt}{values[-1]}{self.tokenizer.end_of(values[-1])}"
        return Rendered(text, None if self.train_on == "all" else ((len(begin) + len(prompt), len(text)),))

    def _renamed_columns(self) -> tuple[tuple[str, ...], str] | None:
        """The column set that `columns` refers to."""
        return next((names for names in COLUMN_SETS if set(self.columns) & {*names[0], names[1]}), None)

    def _history(self, row: Row) -> list[str]:
        """The texts of the earlier pairs, in order."""
        column = self.columns.get("history", "history")
        value = row.get(column)
        if "history" in self.columns and column not in row:
            raise DataError(f"column {column!r} does not exist; the columns are: {', '.join(row)}")
        if isinstance(value, str) and value.strip():
            with suppress(json.JSONDecodeError):
                value = json.loads(value)
        if not value:
            return []
        texts: list[str] = []
        for pair in value if isinstance(value, list) else [value]:
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                raise DataError(f"column {column!r} contains {pair!r}, want a list of pairs of prompt and answer")
            texts += pair
        return texts

    def _value(self, row: Row, name: str) -> str:
        column = self.columns.get(name, name)
        value = row.get(column)
        if value is None and name in _OPTIONAL and (column in row or name not in self.columns):
            return ""
        if not isinstance(value, str):
            state = "does not exist" if column not in row else f"is {'null' if value is None else type(value).__name__}"
            hint = "; for messages in both columns, set type: chat" if isinstance(value, list) else ""
            raise DataError(f"column {column!r} {state}, want a string{hint}; the columns are: {', '.join(row)}")
        return value


def _columns_of(row: Row) -> tuple[tuple[str, ...], str]:
    for parts, answer in COLUMN_SETS:
        if answer in row and parts[0] in row:
            return parts, answer
    wanted = ", or ".join(" and ".join((*parts, answer)) for parts, answer in COLUMN_SETS)
    raise DataError(
        f"want the columns {wanted}; the columns are: {', '.join(row) or 'none'} (set column_names to use other names)"
    )
