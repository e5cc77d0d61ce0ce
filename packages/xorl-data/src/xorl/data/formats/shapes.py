"""Caches the positions of trained turns per shape of conversation, so that turns.py runs once per shape, not per row.

A shape is the sequence of roles and of trained messages. Its frame is computed from a conversation of placeholder
messages: the texts that the template writes between the messages, and the positions of the turns in these texts. Each
conversation is then rendered once. If the result is exactly the frame with the conversation's messages filled in, its
turns are those of the frame. Otherwise turns.py processes it, so the result for a row depends only on that row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xorl.data.errors import DataError
from xorl.data.formats.messages import Conversation
from xorl.data.formats.spans import Rendered
from xorl.data.formats.template import ChatTemplate, Message, TemplateRefusal

# The fields of a message, in order. `thinking` and `reasoning_content` hold the same text.
_PLAIN = ("role", "content")
_REASONING = ("thinking", "role", "content", "reasoning_content")
# Frames are small, and are computed again after eviction.
_MAX_FRAMES = 4096

Shape = tuple[tuple[str, ...], tuple[bool, ...], tuple[int, ...]]


@dataclass(frozen=True)
class _Anchor:
    """The position `offset` characters after the end of slot `slot` - 1, or, for `slot` 0, after the start."""

    slot: int
    offset: int


@dataclass(frozen=True)
class _Frame:
    """The texts between the `slots` (message, field) of a shape, and the positions of the trained turns."""

    slots: tuple[tuple[int, str], ...]
    between: tuple[str, ...]  # one more than slots
    spans: tuple[tuple[_Anchor, _Anchor], ...]
    num_unended: int


class ShapeCache:
    """The frames of one template, for conversations without tools. `find` finds turns without the cache."""

    def __init__(self, template: ChatTemplate, find: Callable[[Conversation, Sequence[int]], Rendered]) -> None:
        self._template = template
        self._find = find
        self._frames: dict[Shape, _Frame | None] = {}

    def render(self, conversation: Conversation, turns: Sequence[int]) -> Rendered:
        """Returns the same result as `find`, and raises the same DataErrors, but faster."""
        frame = self._frame(conversation, turns)
        if frame is not None:
            try:
                text = self._template.render(conversation.messages, None)
            except TemplateRefusal as error:
                raise DataError(f"{self._template.name} rejects the conversation: {error}") from error
            ends = _slot_ends(frame, text, conversation.messages)
            if ends is not None:
                spans = tuple((ends[a.slot] + a.offset, ends[b.slot] + b.offset) for a, b in frame.spans)
                return Rendered(text, spans, frame.num_unended)
        return self._find(conversation, turns)

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
            if len(self._frames) == _MAX_FRAMES:
                self._frames.clear()
            self._frames[shape] = self._compute_frame(messages, turns)
        return self._frames[shape]

    def _compute_frame(self, messages: Sequence[Message], turns: Sequence[int]) -> _Frame | None:
        """The frame; None unless the template writes each placeholder exactly once, in order."""
        placeholders = {
            (number, field): f"Placeholder {number:06} {field}."
            for number, message in enumerate(messages)
            for field in message
            if field in ("content", "reasoning_content")
        }
        probes: list[Message] = [
            {
                name: placeholders[number, "reasoning_content" if name == "thinking" else name]
                for name in message
                if name != "role"
            }
            | {"role": message["role"]}
            for number, message in enumerate(messages)
        ]
        try:
            rendered = self._find(Conversation(probes, None, ()), turns)
        except DataError:
            return None
        text = rendered.text
        # The template may omit reasoning, which then has no slot.
        written = [slot for slot in placeholders if placeholders[slot] in text]
        slots = sorted(written, key=lambda slot: text.index(placeholders[slot]))
        if any(text.count(placeholders[slot]) != 1 for slot in slots):
            return None
        if [number for number, field in slots if field == "content"] != list(range(len(messages))):
            return None
        starts = [text.index(placeholders[slot]) for slot in slots]
        ends = [0, *(start + len(placeholders[slot]) for start, slot in zip(starts, slots, strict=True))]
        spans: list[tuple[_Anchor, _Anchor]] = []
        for span in rendered.spans or ():
            start, stop = (_anchor(character, [*starts, len(text)], ends) for character in span)
            if start is None or stop is None:
                return None
            spans.append((start, stop))
        between = tuple(text[end:start] for end, start in zip(ends, [*starts, len(text)], strict=True))
        return _Frame(tuple(slots), between, tuple(spans), rendered.num_unended)


def _anchor(character: int, starts: Sequence[int], ends: Sequence[int]) -> _Anchor | None:
    """The position of a character relative to the slot before it; None if it is inside a slot."""
    for slot, (end, start) in enumerate(zip(ends, starts, strict=True)):
        if end <= character <= start:
            return _Anchor(slot, character - end)
    return None


def _slot_ends(frame: _Frame, text: str, messages: Sequence[Message]) -> list[int] | None:
    """0 and the end of each slot in `text`; None if `text` is not the frame filled with these messages."""
    if not text.startswith(frame.between[0]):
        return None
    ends, position = [0], len(frame.between[0])
    for (number, field), following in zip(frame.slots, frame.between[1:], strict=True):
        content = str(messages[number][field])
        stripped = content.strip()
        if not stripped:
            return None  # templates and render_turns treat empty contents differently
        for written in (content, stripped):
            end = position + len(written)
            if text.startswith(written, position) and text.startswith(following, end):
                break
        else:
            return None
        ends.append(end)
        position = end + len(following)
    return ends if position == len(text) else None
