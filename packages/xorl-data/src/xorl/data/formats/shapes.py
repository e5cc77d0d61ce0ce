"""Caches, per shape of conversation, where the trained turns are, so that turns.py runs once per shape and not per row.

A shape is the sequence of roles and which messages are trained. Its frame is learnt from a conversation of placeholder
messages: the texts that the template writes between the messages, and where each turn begins and ends in those texts.
Each conversation is then rendered once, whole. If the result is exactly the frame's texts with the conversation's
messages between them, its turns are the frame's. Otherwise turns.py handles it, so that the result for a row depends on
that row alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from xorl.data.errors import DataError
from xorl.data.formats.messages import Conversation
from xorl.data.formats.template import ChatTemplate, Message, TemplateRefusal
from xorl.data.formats.turns import Rendered, render_turns

# The fields that a message of a shape may have. Reasoning has two names for the same text.
_PLAIN = ("role", "content")
_REASONING = ("thinking", "role", "content", "reasoning_content")
# Frames are small, and learnt again after eviction.
_MOST_FRAMES = 4096

Shape = tuple[tuple[str, ...], tuple[bool, ...], tuple[int, ...]]


@dataclass(frozen=True)
class _Place:
    """The position `offset` characters after slot text `slot` - 1 of a conversation, or after its beginning (0)."""

    slot: int
    offset: int


@dataclass(frozen=True)
class _Frame:
    """A template's texts around the `slots` (message, field) of a shape, and the places of the trained turns."""

    slots: tuple[tuple[int, str], ...]
    between: tuple[str, ...]  # one more than slots
    spans: tuple[tuple[_Place, _Place], ...]
    num_unended: int


class Shapes:
    """The frames of one template, for conversations without tools."""

    def __init__(self, template: ChatTemplate, special: re.Pattern[str]) -> None:
        self._template = template
        self._special = special
        self._frames: dict[Shape, _Frame | None] = {}

    def render(self, conversation: Conversation, turns: Sequence[int]) -> Rendered:
        """The conversation with the turns that render_turns would mark. Raises DataError as it does."""
        frame = self._frame(conversation, turns)
        if frame is not None:
            try:
                text = self._template.render(conversation.messages, None)
            except TemplateRefusal as error:
                raise DataError(f"{self._template.name} does not take the conversation: {error}") from error
            ends = _fill(frame, text, conversation.messages)
            if ends is not None:
                spans = tuple((ends[a.slot] + a.offset, ends[b.slot] + b.offset) for a, b in frame.spans)
                return Rendered(text, spans, frame.num_unended)
        return render_turns(self._template, conversation, turns, self._special)

    def _frame(self, conversation: Conversation, turns: Sequence[int]) -> _Frame | None:
        messages = conversation.messages
        fields = [tuple(message) for message in messages]
        if any(names not in (_PLAIN, _REASONING) for names in fields):
            return None
        shape = (
            tuple(str(message["role"]) for message in messages),
            tuple(names == _REASONING for names in fields),
            tuple(turns),
        )
        if shape not in self._frames:
            if len(self._frames) == _MOST_FRAMES:
                self._frames.clear()
            self._frames[shape] = self._learn(messages, turns)
        return self._frames[shape]

    def _learn(self, messages: Sequence[Message], turns: Sequence[int]) -> _Frame | None:
        """The frame; None unless each placeholder appears exactly once, in order."""
        said = {
            (number, field): f"Placeholder {number:06} {field}."
            for number, message in enumerate(messages)
            for field in message
            if field in ("content", "reasoning_content")
        }
        probes: list[Message] = [
            {
                name: said[number, "reasoning_content" if name == "thinking" else name]
                for name in message
                if name != "role"
            }
            | {"role": message["role"]}
            for number, message in enumerate(messages)
        ]
        try:
            rendered = render_turns(self._template, Conversation(probes, None, ()), turns, self._special)
        except DataError:
            return None
        text = rendered.text
        # A template may drop reasoning or keep it: the frame records which.
        slots = sorted((slot for slot in said if said[slot] in text), key=lambda slot: text.index(said[slot]))
        if any(text.count(said[slot]) != 1 for slot in slots):
            return None
        if [number for number, field in slots if field == "content"] != list(range(len(messages))):
            return None
        starts = [text.index(said[slot]) for slot in slots]
        ends = [0, *(start + len(said[slot]) for start, slot in zip(starts, slots, strict=True))]
        spans: list[tuple[_Place, _Place]] = []
        for span in rendered.spans:
            start, stop = (_place(character, [*starts, len(text)], ends) for character in span)
            if start is None or stop is None:
                return None
            spans.append((start, stop))
        between = tuple(text[end:start] for end, start in zip(ends, [*starts, len(text)], strict=True))
        return _Frame(tuple(slots), between, tuple(spans), rendered.num_unended)


def _place(character: int, starts: Sequence[int], ends: Sequence[int]) -> _Place | None:
    """The place of a character relative to the slot text before it; None inside a slot text."""
    for slot, (end, start) in enumerate(zip(ends, starts, strict=True)):
        if end <= character <= start:
            return _Place(slot, character - end)
    return None


def _fill(frame: _Frame, text: str, messages: Sequence[Message]) -> list[int] | None:
    """The end in `text` of each slot's text, after 0; None if `text` is not the frame filled with these messages."""
    if not text.startswith(frame.between[0]):
        return None
    ends, place = [0], len(frame.between[0])
    for (number, field), following in zip(frame.slots, frame.between[1:], strict=True):
        own = str(messages[number][field])
        bare = own.strip()
        if not bare:
            return None  # templates write nothing around what is empty, or the rule has its own way with it
        for written in (own, bare):
            end = place + len(written)
            if text.startswith(written, place) and text.startswith(following, end):
                break
        else:
            return None
        ends.append(end)
        place = end + len(following)
    return ends if place == len(text) else None
