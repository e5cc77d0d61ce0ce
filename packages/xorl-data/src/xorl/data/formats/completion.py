"""The prompt_completion format: prompt and answer columns, concatenated as they are, trained on the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from xorl.data.errors import DataError
from xorl.data.formats.encoded import EncodedDocuments, Overflow, fit
from xorl.data.formats.spans import Text, tokenize
from xorl.data.formats.tokenizer import TextTokenizer
from xorl.data.readers import Piece, Row
from xorl.data.receipt import Counts
from xorl.data.shuffle import JSON

CompletionTarget = Literal["completion", "all"]
# The parts of a prompt in order, and its answer. `input` may be missing or empty.
SHAPES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("prompt",), "completion"),
    (("instruction", "input"), "output"),
    (("question",), "answer"),
)
_OPTIONAL = ("input",)
# A prompt that is not meant to be continued directly is separated by a blank line from what follows.
_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class PromptCompletionFormat:
    """Rows of prompt and completion, of instruction, input and output, or of question and answer.

    A completion follows its prompt directly; the parts of the other shapes are separated by blank lines. The text ends
    with one EOS, which is trained, and begins with BOS if the tokenizer itself would add it. `columns` maps those names
    to the columns that hold them.
    """

    limit: int
    overflow: Overflow
    limit_option: str
    tokenizer: TextTokenizer
    train_on: CompletionTarget = "completion"
    columns: Mapping[str, str] = field(default_factory=dict)
    vocab_size: int | None = None

    @property
    def extras(self) -> tuple[str, ...]:
        return ()

    @property
    def selected(self) -> tuple[str, ...]:
        # If one of them is missing, the reader returns all columns, so that an optional one is never left unread.
        parts, answer = next((shape for shape in SHAPES if set(self.columns) & {*shape[0], shape[1]}), SHAPES[0])
        return tuple(self.columns.get(name, name) for name in (*parts, answer))

    @property
    def masks_prompts(self) -> bool:
        return self.train_on != "all"

    @property
    def writes_the_day(self) -> bool:
        return False

    def fingerprint(self) -> dict[str, JSON]:
        return {
            "type": "prompt_completion",
            "limit": self.limit,
            "overflow": self.overflow,
            "tokenizer": self.tokenizer.content,
            "train_on": self.train_on,
            "columns": dict(self.columns),
        }

    def encode(self, piece: Piece) -> EncodedDocuments:
        texts: list[Text] = []
        for index, row in enumerate(piece.rows()):
            try:
                texts.append(self._text(row))
            except DataError as error:
                raise DataError(f"{piece.place(index)}: {error}") from error
        return fit(tokenize(texts, self.tokenizer, piece, Counts()), piece, self)

    def _text(self, row: Row) -> Text:
        parts, answer = self._shape(row)
        values = [self._value(row, name) for name in (*parts, answer)]
        prompt = _SEPARATOR.join(value for value in values[:-1] if value)
        if answer != "completion" and prompt:
            prompt += _SEPARATOR
        if not values[-1]:
            raise DataError(f"column {self.columns.get(answer, answer)!r} is empty: there is nothing to learn")
        begin = self.tokenizer.begin_of(prompt or values[-1])
        text = f"{begin}{prompt}{values[-1]}{self.tokenizer.end_of(values[-1])}"
        return Text(text, None if self.train_on == "all" else ((len(begin) + len(prompt), len(text)),))

    def _shape(self, row: Row) -> tuple[tuple[str, ...], str]:
        if self.columns:
            return next(shape for shape in SHAPES if set(self.columns) & {*shape[0], shape[1]})
        for parts, answer in SHAPES:
            if answer in row and parts[0] in row:
                return parts, answer
        wanted = ", or ".join(" and ".join((*parts, answer)) for parts, answer in SHAPES)
        raise DataError(
            f"want the columns {wanted}; the columns are: {', '.join(row) or 'none'} (columns: names others)"
        )

    def _value(self, row: Row, name: str) -> str:
        column = self.columns.get(name, name)
        value = row.get(column)
        if value is None and name in _OPTIONAL:
            return ""
        if not isinstance(value, str):
            state = (
                "does not exist" if column not in row else f"holds {'null' if value is None else type(value).__name__}"
            )
            hint = "; for messages use type: chat" if isinstance(value, list) else ""
            raise DataError(f"column {column!r} {state}, want a string{hint}; the columns are: {', '.join(row)}")
        return value
