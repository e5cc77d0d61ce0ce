"""The chat format: conversations rendered by a chat template, trained on what the assistant says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from xorl.data.errors import DataError
from xorl.data.formats.encoded import EncodedDocuments, Overflow, fit
from xorl.data.formats.messages import COLUMN_NAMES, REASONING, Conversation, as_sent, read_conversation
from xorl.data.formats.shapes import Shapes
from xorl.data.formats.spans import Text, tokenize
from xorl.data.formats.template import ChatTemplate, load_template
from xorl.data.formats.tokenizer import TextTokenizer
from xorl.data.formats.turns import Rendered, render_all, render_turns, special_pattern
from xorl.data.readers import Piece, Row
from xorl.data.receipt import Counts
from xorl.data.shuffle import JSON

ChatTarget = Literal["assistant", "last_turn", "all"]


@dataclass(frozen=True)
class ChatFormat:
    """Conversations. `template` is a file, the name of one of the tokenizer's templates, or None for its default.

    `train_on` assistant trains every assistant message, last_turn those after the last user message, all every token.
    `template_kwargs` are variables of the template. `columns` maps messages, tools and system to the columns that hold
    them.
    """

    limit: int
    overflow: Overflow
    limit_option: str
    tokenizer: TextTokenizer
    template: str | None = None
    template_option: str = "chat_template"
    template_kwargs: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    train_on: ChatTarget = "assistant"
    columns: Mapping[str, str] = field(default_factory=dict)
    vocab_size: int | None = None

    @property
    def extras(self) -> tuple[str, ...]:
        return ()

    @property
    def selected(self) -> tuple[str, ...]:
        # If one of them is missing, the reader returns all columns, so that an optional one is never left unread.
        names = (self.columns["messages"],) if "messages" in self.columns else COLUMN_NAMES
        others = [self.columns.get(name, name) for name in ("tools", "system")]
        return tuple(dict.fromkeys((*names, *others)))

    @property
    def masks_prompts(self) -> bool:
        return self.train_on != "all"

    def fingerprint(self) -> dict[str, JSON]:
        return {
            "type": "chat",
            "limit": self.limit,
            "overflow": self.overflow,
            "tokenizer": self.tokenizer.content,
            "template": [self._template.source, self._tool_template.source],
            "template_kwargs": dict(self.template_kwargs),
            "train_on": self.train_on,
            "columns": dict(self.columns),
        }

    def encode(self, piece: Piece) -> EncodedDocuments:
        texts: list[Text] = []
        num_unended = num_unwritten = 0
        for index, row in enumerate(piece.rows()):
            try:
                rendered = self.render(row)
            except DataError as error:
                raise DataError(f"{piece.place(index)}: {error}") from error
            texts.append(Text(rendered.text, None if self.train_on == "all" else rendered.spans))
            num_unended += rendered.num_unended
            num_unwritten += rendered.lacks_reasoning
        counts = Counts(unended_turns=num_unended, unwritten_reasoning=num_unwritten)
        return fit(tokenize(texts, self.tokenizer, piece, counts), piece, self)

    def render(self, row: Row) -> Rendered:
        """One row as text with its trained characters. DataError, without the row's place, for an unusable row."""
        conversation = read_conversation(row, self.columns)
        rendered = self._spelled(conversation)
        thoughts = [str(message[REASONING]).strip() for message in conversation.messages if REASONING in message]
        lacks = any(thoughts) and not any(thought and thought in rendered.text for thought in thoughts)
        return replace(rendered, lacks_reasoning=True) if lacks else rendered

    def _spelled(self, conversation: Conversation) -> Rendered:
        """The conversation with its tool calls in one form or another, whichever the template accepts."""
        try:
            return self._rendered(conversation)
        except DataError:
            for sent in as_sent(conversation):
                with suppress(DataError):
                    rendered = self._rendered(sent)
                    # A template that prints every value would print null as None.
                    if rendered.text.count("None") <= json.dumps(sent.messages).count("None"):
                        return rendered
            raise

    def _rendered(self, conversation: Conversation) -> Rendered:
        template = self._template if conversation.tools is None else self._tool_template
        if self.train_on == "all":
            return render_all(template, conversation)
        turns = self._turns(conversation)
        if conversation.tools is None:
            return self._shapes.render(conversation, turns)
        return render_turns(template, conversation, turns, self._special)

    def check_template(self) -> None:
        """Raises DataError for an unusable template, or one without a variable of a given name."""
        unknown = sorted(self.template_kwargs.keys() - (self._template.variables | self._tool_template.variables))
        if unknown:
            raise DataError(
                f"{self.template_option}_kwargs: {unknown[0]} is no variable of {self._template.name}; it reads "
                f"{', '.join(sorted(self._template.variables)) or 'none'}"
            )

    @property
    def writes_the_day(self) -> bool:
        """Whether the rendered text contains the current date."""
        return self._template.writes_the_day or self._tool_template.writes_the_day

    def _turns(self, conversation: Conversation) -> list[int]:
        """The indices of the messages that are trained."""
        roles = [message["role"] for message in conversation.messages]
        first = 0
        if self.train_on == "last_turn":
            # If the conversation ends with a question, train the answer to the question before it.
            spoken = max(number for number, role in enumerate(roles) if role == "assistant")
            first = max((number for number in range(spoken) if roles[number] == "user"), default=0)
        return [
            number
            for number, role in enumerate(roles)
            if role == "assistant" and number >= first and conversation.trained[number] is not False
        ]

    @cached_property
    def _template(self) -> ChatTemplate:
        return self._load(with_tools=False)

    @cached_property
    def _tool_template(self) -> ChatTemplate:
        return self._load(with_tools=True)

    def _load(self, *, with_tools: bool) -> ChatTemplate:
        option, kwargs = self.template_option, self.template_kwargs
        return load_template(option, self.template, self.tokenizer, with_tools=with_tools, kwargs=kwargs)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return special_pattern(self.tokenizer.special_texts)

    @cached_property
    def _shapes(self) -> Shapes:
        return Shapes(self._template, self._special)

    def __getstate__(self) -> dict[str, object]:
        # Compiled templates cannot be pickled; they are compiled again from the same sources.
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}
