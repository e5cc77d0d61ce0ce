"""Images in conversations: content parts with a source of their own, and places for the images of a column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xorl.data.errors import DataError
from xorl.data.formats.messages import Conversation
from xorl.data.formats.parts import Part, text_in
from xorl.data.formats.template import Message
from xorl.data.images.source import SOURCE_KEYS

IMAGES = "images"
# The place of an image in a text, where the images are in a column.
_PLACE = "<image>"
_IMAGE: Part = {"type": "image"}


def images_in(value: object) -> list[object]:
    """The images in a row's column: a list, or a single one."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def has_images(conversation: Conversation, column: Sequence[object]) -> bool:
    """Whether there is any image, in the column or in the messages."""
    contents = (message["content"] for message in conversation.messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return bool(column) or any(part["type"] == "image" for part in parts)


def place_images(conversation: Conversation, column: Sequence[object]) -> tuple[Conversation, list[object]]:
    """The conversation as templates expect it, and what the row gives for each of its images, in order.

    A part of type image has its own source, or is a place for the next image of `column`. If the column has images,
    each <image> in a text is a place, too. Raises DataError unless there are as many places as images in the column.
    """
    given: list[object] = []
    num_places = 0
    messages: list[Message] = []
    for message in conversation.messages:
        content = message["content"]
        parts = _parts_of(content) if column and isinstance(content, str) else content
        if not isinstance(parts, list):
            messages.append(message)
            continue
        for part in parts:
            if part["type"] != "image":
                continue
            source = {key: part[key] for key in SOURCE_KEYS if key in part}
            if source:
                given.append(source)
                continue
            given.append(column[num_places] if num_places < len(column) else None)
            num_places += 1
        shown = [_IMAGE if part["type"] == "image" else part for part in parts]
        messages.append({**message, "content": shown if _IMAGE in shown else content})
    if num_places != len(column):
        raise DataError(
            f"the conversation has {num_places} places for images, and the column of images {len(column)}: give each "
            f'image a part {{"type": "image"}} in the content of its message, or write {_PLACE} in its text'
        )
    return replace(conversation, messages=messages), given


def _parts_of(text: str) -> str | list[Part]:
    """A text with places for images as parts."""
    if _PLACE not in text:
        return text
    parts: list[Part] = []
    for index, piece in enumerate(text.split(_PLACE)):
        parts += [dict(_IMAGE)] if index else []
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def listed(conversation: Conversation) -> Conversation:
    """The conversation with every content as a list of parts, the only form that some templates accept with images."""
    messages: list[Message] = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in conversation.messages
    ]
    return replace(conversation, messages=messages)


def missing_text(conversation: Conversation, text: str) -> int | None:
    """The first message of which a part is not in the rendered text; None if all are."""
    for number, message in enumerate(conversation.messages):
        content = message["content"]
        parts = [text_in([part]) for part in content] if isinstance(content, list) else [str(content or "")]
        if any(part.strip() not in text for part in parts):
            return number
    return None
