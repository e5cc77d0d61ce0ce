"""The preference format: a prompt with a chosen and a rejected answer, rendered by the formats of single answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np

from xorl.data.batch import IGNORE, PREFERENCE
from xorl.data.chunks import Chunk, Row, SomeRows
from xorl.data.errors import DataError
from xorl.data.formats.chat import ChatFormat
from xorl.data.formats.completion import PromptCompletionFormat
from xorl.data.formats.encoded import EncodedRows
from xorl.data.formats.messages import holds_messages
from xorl.data.formats.parts import parsed_json
from xorl.data.formats.spans import Rendered
from xorl.data.formats.text import RenderedFormat
from xorl.data.hashing import JSON

PREFERENCE_COLUMNS = ("prompt", "chosen", "rejected")
# Columns that the chat and the prompt_completion format read in addition to the answers.
_CONTEXT_COLUMNS = ("system", "tools")
_KWARGS = "chat_template_kwargs"


@dataclass(frozen=True)
class PreferenceFormat(RenderedFormat):
    """Pairs of answers to a prompt. A document is the prompt with the chosen answer, then with the rejected one.

    Answers in text follow their prompt directly, as in type prompt_completion. Answers in messages are rendered by
    `chat`, None if the tokenizer has no template: their prompt is the column prompt or, without messages in it, the
    messages with which both begin. Only answers are trained.
    """

    chat: ChatFormat | None = None

    type_name: ClassVar[str] = "preference"

    @property
    def extras(self) -> tuple[str, ...]:
        return (PREFERENCE,)

    @property
    def selected(self) -> tuple[str, ...]:
        # If one of these is missing, the reader returns all columns, so an optional column is never skipped.
        return tuple(self.columns.get(name, name) for name in (*PREFERENCE_COLUMNS, *_CONTEXT_COLUMNS, _KWARGS))

    @property
    def masks_prompts(self) -> bool:
        return True

    @property
    def uses_current_date(self) -> bool:
        return self.chat is not None and self.chat.uses_current_date

    def fingerprint(self) -> dict[str, JSON]:
        chat = {} if self.chat is None else {"chat": cast(JSON, self.chat.fingerprint())}
        return {**super().fingerprint(), **chat}

    def used_columns(self, row: Row) -> frozenset[str]:
        return frozenset(self.selected)

    def unused_keys(self) -> tuple[str, ...]:
        return () if self.chat is None else self.chat.unused_keys()

    def render(self, row: Row) -> Rendered:
        given = {name: self._value(row, name) for name in ("chosen", "rejected")}
        context = {name: row.get(self.columns.get(name, name)) for name in (*_CONTEXT_COLUMNS, _KWARGS)}
        common = {name: value for name, value in context.items() if value is not None}
        prompt = row.get(self.columns.get("prompt", "prompt"))
        if given["chosen"] == given["rejected"]:
            raise DataError(
                "the chosen and the rejected answer are the same; remove the pair, or set the entry's skip_bad_rows"
            )
        if not any(map(holds_messages, given.values())):
            chosen, rejected = (self._text(name).render(self._of_text(row)) for name in given)
            return replace(chosen, rejected=rejected)
        if self.chat is None:
            raise DataError("the answers are messages, which need a chat template; set the entry's chat_template")
        answers = [self._messages(value, name) for name, value in given.items()]
        begin = self._messages(prompt, "prompt") if holds_messages(prompt) else []
        if not begin:
            shared = _num_shared(*answers)
            begin, answers = answers[0][:shared], [answer[shared:] for answer in answers]
        if not begin and isinstance(prompt, str):
            begin = [{"role": "user", "content": prompt}]
        if not begin:
            raise DataError(
                f"there is no prompt: {self.columns.get('chosen', 'chosen')!r} and "
                f"{self.columns.get('rejected', 'rejected')!r} must begin with the same messages and go on with an "
                "answer each; or put the prompt into the column prompt"
            )
        rows = ({**common, "prompt": begin, "completion": answer} for answer in answers)
        chosen, rejected = map(self.chat.render, rows)
        return replace(chosen, rejected=rejected)

    def tokenize(self, rendered: Sequence[Rendered], chunk: Chunk) -> EncodedRows:
        """Tokenizes pairs. Raises DataError if an answer has no trained token."""
        both = [side for text in rendered for side in (text, cast(Rendered, text.rejected))]
        indices = np.repeat(np.arange(len(rendered)), 2).tolist()
        rows = super().tokenize(both, SomeRows(chunk, indices, [{} for _ in indices], ()))
        stops = np.cumsum(rows.lengths)
        assert rows.labels is not None or not len(rendered), "prompts have no labels"
        labels = np.empty(0, np.int32) if rows.labels is None else rows.labels
        # No token predicts the first one of an answer with its prompt.
        labels[(stops - rows.lengths)[rows.lengths > 0]] = IGNORE
        trained_before = np.concatenate([[0], np.cumsum(labels != IGNORE)])
        num_trained = trained_before[stops] - trained_before[stops - rows.lengths]
        if not num_trained.all():
            side = int(np.argmin(num_trained > 0))
            name = ("chosen", "rejected")[side % 2]
            raise DataError(f"{chunk.location(side // 2)}: the {name} answer has no trained token; remove the pair")
        return replace(
            rows,
            labels=labels,
            extras={PREFERENCE: np.repeat(np.tile(np.array([1, -1], np.float32), len(rendered)), rows.lengths)},
            lengths=rows.lengths.reshape(-1, 2).sum(1),
        )

    def _text(self, answer: str) -> PromptCompletionFormat:
        """The format of a prompt with one of the answers, whose errors name the columns of the pair."""
        names = {"prompt": "prompt", "completion": answer}
        columns = {name: self.columns.get(column, column) for name, column in names.items()}
        columns |= {"system": self.columns["system"]} if "system" in self.columns else {}
        return PromptCompletionFormat(self.limit, self.overflow, self.limit_option, self.tokenizer, columns)

    def _of_text(self, row: Row) -> Row:
        """What a pair of texts has in a row."""
        return {column: row[column] for column in self.selected if column in row}

    def _value(self, row: Row, name: str) -> object:
        column = self.columns.get(name, name)
        if row.get(column) is None:
            state = "is null" if column in row else "does not exist"
            raise DataError(
                f"column {column!r} {state}; the columns are: {', '.join(row) or 'none'} (set column_names to use "
                "another one)"
            )
        return row[column]

    def _messages(self, value: object, name: str) -> list[object]:
        column = self.columns.get(name, name)
        if isinstance(value, str):
            value = parsed_json(value, f"column {column!r}")
        if isinstance(value, dict):
            value = [value]
        if not isinstance(value, list) or not value:
            shown = "an empty list" if value == [] else type(value).__name__
            raise DataError(f"column {column!r} is {shown}, want a list of messages")
        return [*value]


def _num_shared(chosen: Sequence[object], rejected: Sequence[object]) -> int:
    """The number of leading messages that both share; at least one message of each is left as the answer."""
    most = min(len(chosen), len(rejected)) - 1
    return next((number for number in range(most) if chosen[number] != rejected[number]), most)
