"""The chat format: renders conversations with a chat template and trains on the assistant's messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar, Literal

from xorl.data.chunks import Chunk, Row
from xorl.data.errors import DataError
from xorl.data.formats.encoded import EncodedRows
from xorl.data.formats.finder import TurnFinder
from xorl.data.formats.keys import KeyTests
from xorl.data.formats.messages import (
    MESSAGE_COLUMNS,
    REASONING,
    Conversation,
    api_variants,
    message_columns,
    read_conversation,
)
from xorl.data.formats.pictures import IMAGES, has_images, images_in, listed, missing_text, place_images
from xorl.data.formats.spans import Rendered
from xorl.data.formats.template import ChatTemplate, TemplateRefusal, load_template
from xorl.data.formats.text import RenderedFormat
from xorl.data.formats.turns import render_all, special_pattern
from xorl.data.hashing import JSON
from xorl.data.images.expand import expand_images
from xorl.data.images.settings import ImageSettings
from xorl.data.images.source import image_source

# Templates with a row's own variables are compiled again after eviction.
_MAX_FINDERS = 256

# The columns beside the messages.
_OTHER_COLUMNS = ("tools", "system", IMAGES)

ChatTarget = Literal["assistant", "last_turn", "all"]


@dataclass(frozen=True)
class ChatFormat(RenderedFormat):
    """Conversations. `template` is a file, the name of one of the tokenizer's templates, or None for its default.

    `train_on`: assistant trains every assistant message, last_turn only those after the last user message, all every
    token. `template_kwargs` are variables for the template; a row may set its own (chat_template_kwargs). The columns
    are messages (or prompt and completion), tools, system and images. `images`: how images are read; None refuses them.
    """

    template: str | None = None
    template_option: str = "chat_template"
    template_kwargs: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    train_on: ChatTarget = "assistant"
    images: ImageSettings | None = None

    type_name: ClassVar[str] = "chat"

    @property
    def selected(self) -> tuple[str, ...]:
        # If one of these is missing, the reader returns all columns, so an optional column is never skipped.
        names = (self.columns["messages"],) if "messages" in self.columns else MESSAGE_COLUMNS
        others = [self.columns.get(name, name) for name in _OTHER_COLUMNS]
        return tuple(dict.fromkeys((*names, *others)))

    @property
    def masks_prompts(self) -> bool:
        return self.train_on != "all"

    def used_columns(self, row: Row) -> frozenset[str]:
        others = (self.columns.get(name, name) for name in _OTHER_COLUMNS)
        return frozenset((*message_columns(row, self.columns), *others, "chat_template_kwargs"))

    def unused_keys(self) -> tuple[str, ...]:
        return self._key_tests.unused

    def fingerprint(self) -> dict[str, JSON]:
        return {
            **super().fingerprint(),
            "template": [self._template.source, self._tool_template.source],
            "template_kwargs": dict(self.template_kwargs),
            "train_on": self.train_on,
            **({} if self.images is None else {"images": self.images.fingerprint()}),
        }

    def render(self, row: Row) -> Rendered:
        conversation = read_conversation(row, self.columns)
        column = images_in(row.get(self.columns.get(IMAGES, IMAGES)))
        if not has_images(conversation, column):
            return self._render_row(conversation if self.images is None else self._accepted_form(conversation))
        if self.images is None:
            raise DataError(
                "the conversation has images, which only a model with an image encoder reads, and only in prepared "
                "data of type chat; use such a model, type chat and no streaming, or remove the images "
                "(ignore_columns leaves out a column)"
            )
        conversation, given = place_images(conversation, column)
        sources = tuple(image_source(value, self.images.root) for value in given)
        return replace(self._render_row(self._accepted_form(conversation)), images=sources)

    def _render_row(self, conversation: Conversation) -> Rendered:
        rendered = self._render_any_variant(conversation)
        self._key_tests.add(conversation, rendered.text, self._finder(conversation).template)
        thoughts = [str(message[REASONING]).strip() for message in conversation.messages if REASONING in message]
        lacks = any(thoughts) and not any(thought and thought in rendered.text for thought in thoughts)
        return replace(rendered, lacks_reasoning=True) if lacks else rendered

    def tokenize(self, rendered: Sequence[Rendered], chunk: Chunk) -> EncodedRows:
        """The tokens of rendered texts with those of their images."""
        rows = super().tokenize(rendered, chunk)
        if self.images is None:
            return rows
        return expand_images(rows, [each.images for each in rendered], self.images, chunk)

    def _render_any_variant(self, conversation: Conversation) -> Rendered:
        """Renders the conversation with its tool calls in the first form that the template accepts."""
        try:
            return self._render(conversation)
        except DataError:
            for variant in api_variants(conversation):
                with suppress(DataError):
                    rendered = self._render(variant)
                    # Rejects templates that print every value, and so print null as None.
                    if rendered.text.count("None") <= json.dumps(variant.messages).count("None"):
                        return rendered
            raise

    def _accepted_form(self, conversation: Conversation) -> Conversation:
        """The conversation with its contents as they are or, if the template then omits any text, as lists of parts."""
        template = self._finder(conversation).template
        for form in (conversation, listed(conversation)):
            try:
                text = template.render(form.messages, form.tools)
            except TemplateRefusal:
                continue
            if missing_text(form, text) is None:
                return form
        return conversation

    def _render(self, conversation: Conversation) -> Rendered:
        finder = self._finder(conversation)
        if self.train_on != "all":
            return finder.render(conversation, self._turns(conversation))
        if False in conversation.trained:
            raise DataError(
                f"message {conversation.trained.index(False)} is not to be trained, but train_on: all trains every "
                "token; set train_on to assistant, or remove the key"
            )
        return render_all(finder.template, conversation)

    def check_template(self) -> None:
        """Raises DataError if the template is unusable, or does not use one of `template_kwargs`."""
        unknown = sorted(self.template_kwargs.keys() - (self._template.variables | self._tool_template.variables))
        if unknown:
            raise DataError(
                f"{self.template_option}_kwargs: {unknown[0]} is not a variable of {self._template.name}; it uses: "
                f"{', '.join(sorted(self._template.variables)) or 'none'}"
            )

    @property
    def uses_current_date(self) -> bool:
        """Whether the rendered text contains the current date."""
        return self._template.uses_current_date or self._tool_template.uses_current_date

    def _turns(self, conversation: Conversation) -> list[int]:
        """The indices of the messages that are trained."""
        roles = [message["role"] for message in conversation.messages]
        first = conversation.num_prompt
        if self.train_on == "last_turn":
            # If the conversation ends with a question, this is the answer to the previous question.
            last_answer = max(number for number, role in enumerate(roles) if role == "assistant")
            first = max([first, *(number for number in range(last_answer) if roles[number] == "user")])
            if True in conversation.trained[:first]:
                raise DataError(
                    f"message {conversation.trained.index(True)} is to be trained, but train_on: last_turn excludes "
                    "it; set train_on to assistant, or remove the key"
                )
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

    def _load(self, *, with_tools: bool, kwargs: Mapping[str, object] = MappingProxyType({})) -> ChatTemplate:
        kwargs = {**self.template_kwargs, **kwargs}
        return load_template(self.template_option, self.template, self.tokenizer, with_tools=with_tools, kwargs=kwargs)

    def _finder(self, conversation: Conversation) -> TurnFinder:
        """The template for a conversation, which depends on whether it has tools, and on its own variables."""
        with_tools, kwargs = conversation.tools is not None, conversation.template_kwargs
        key = with_tools, json.dumps(kwargs, sort_keys=True) if kwargs else ""
        if key not in self._finders:
            if len(self._finders) == _MAX_FINDERS:
                self._finders.clear()
            own = self._tool_template if with_tools else self._template
            template = self._load(with_tools=with_tools, kwargs=kwargs) if kwargs else own
            self._finders[key] = TurnFinder(template, self._special)
        return self._finders[key]

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return special_pattern(self.tokenizer.special_texts)

    @cached_property
    def _finders(self) -> dict[tuple[bool, str], TurnFinder]:
        return {}

    @cached_property
    def _key_tests(self) -> KeyTests:
        return KeyTests()

    def __getstate__(self) -> dict[str, object]:
        # Compiled templates cannot be pickled and are compiled again.
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}
