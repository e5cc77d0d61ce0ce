"""Tests whether the keys of messages, and a row's template variables, change the text of conversations."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from xorl.data.formats.messages import KNOWN_KEYS, Conversation
from xorl.data.formats.template import ChatTemplate, Message, TemplateRefusal

# A template may use a key only for some roles, so keys that it mentions are tested with several conversations.
_NUM_TESTS = 8


class KeyTests:
    """The keys seen so far. Each is left out of some conversations; if a text then changes, the key is used."""

    def __init__(self) -> None:
        self._tests: dict[str, int] = {}
        self._used: set[str] = set()
        self._never_used: dict[str, None] = {}

    @property
    def unused(self) -> tuple[str, ...]:
        """The keys that changed no text: `messages[].name`, `tools`, `chat_template_kwargs.name`."""
        return (*(key for key in self._tests if key not in self._used), *self._never_used)

    def add(self, conversation: Conversation, text: str, template: ChatTemplate) -> None:
        """Tests the keys of a conversation that `template` renders as `text`."""
        self._never_used |= dict.fromkeys(conversation.unread)
        for name in conversation.template_kwargs:
            if name not in template.variables:
                self._never_used[f"chat_template_kwargs.{name}"] = None
        found = {key for message in conversation.messages if len(message) > 2 for key in message} - KNOWN_KEYS
        for key in sorted(found):
            if self._is_tested(f"messages[].{key}", is_mentioned=key in template.mentioned):
                continue
            without: list[Message] = [
                {name: value for name, value in message.items() if name != key} for message in conversation.messages
            ]
            self._test(f"messages[].{key}", replace(conversation, messages=without), text, template)
        if conversation.tools and not self._is_tested("tools", is_mentioned=True):
            self._test("tools", replace(conversation, tools=None), text, template)

    def _is_tested(self, key: str, *, is_mentioned: bool) -> bool:
        return key in self._used or self._tests.get(key, 0) >= (_NUM_TESTS if is_mentioned else 1)

    def _test(self, key: str, without: Conversation, text: str, template: ChatTemplate) -> None:
        """Note whether the key is used: whether the conversation has another text than `text` without it."""
        self._tests[key] = self._tests.get(key, 0) + 1
        is_used = True  # if the template rejects the conversation without it
        with suppress(TemplateRefusal):
            is_used = template.render(without.messages, without.tools) != text
        if is_used:
            self._used.add(key)
