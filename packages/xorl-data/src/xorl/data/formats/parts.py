"""Reads the contents and tool calls of messages, and JSON that a column or key holds as text."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set

from xorl.data.chunks import JSON_DECODER, DuplicateKeyError
from xorl.data.errors import DataError
from xorl.data.formats.masks import check_part_masks
from xorl.data.images.source import SOURCE_KEYS

Part = dict[str, object]

_PART_KEYS = frozenset(("type", "text"))
_IMAGE_TYPES = ("image", "image_url")
# The keys of a call that are kept, in both forms: with its name and arguments in `function`, or beside the others.
_CALL_KEYS = frozenset(("id", "index", "type", "function", "name", "arguments"))
_FUNCTION_KEYS = frozenset(("name", "arguments"))


def parsed_json(text: str, what: str, problem: str = "is a string that is not JSON") -> object:
    """The value of JSON text; `what` holds the text. Raises DataError for invalid JSON and for repeated keys."""
    try:
        value: object = JSON_DECODER.decode(text)
    except DuplicateKeyError as error:
        raise DataError(f"{what} {error}") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{what} {problem}: {error.msg}") from error
    return value


def unread_keys(messages: Sequence[object]) -> tuple[str, ...]:
    """The keys of the parts and tool calls of messages that are not read, such as `messages[].content[].name`."""
    found: dict[str, None] = {}
    for message in messages:
        if not isinstance(message, dict):
            continue
        for part in _objects(message.get("content")):
            known = {*_PART_KEYS, *SOURCE_KEYS} if part.get("type") in _IMAGE_TYPES else _PART_KEYS
            found |= _others(part, known, "messages[].content[]")
        for call in _objects(message.get("tool_calls")):
            found |= _others(call, _CALL_KEYS, "messages[].tool_calls[]")
            for function in _objects([call.get("function")]):
                found |= _others(function, _FUNCTION_KEYS, "messages[].tool_calls[].function")
    return tuple(found)


def _objects(value: object) -> list[dict[object, object]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _others(item: dict[object, object], known: Set[str], location: str) -> dict[str, None]:
    return {f"{location}.{key}": None for key, value in item.items() if key not in known and value is not None}


def content_of(content: object, number: int, *, may_be_missing: bool) -> str | list[Part]:
    """The content as one string if all of its parts are text, which are joined; otherwise as its parts.

    Raises DataError for parts that are neither text nor images.
    """
    if content is None and may_be_missing:
        return ""
    if isinstance(content, list):
        parts = [_part(part, number) for part in content]
        if parts and all(part["type"] == "text" for part in parts):
            return "".join(str(part["text"]) for part in parts)
        if parts:
            return parts
        raise DataError(f"message {number}: content is an empty list, want a string or a list of parts")
    if not isinstance(content, str):
        raise DataError(
            f"message {number}: content is {'null' if content is None else type(content).__name__}, want a string"
        )
    return content


def _part(part: object, number: int) -> Part:
    """A part of the content of message `number`, of the type text or image."""
    if not isinstance(part, dict):
        raise DataError(f"message {number}: a part of its content is {type(part).__name__}, want an object with type")
    check_part_masks(part, number)
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in _IMAGE_TYPES:
        given = {key: part[key] for key in SOURCE_KEYS if part.get(key) is not None}
        return {"type": "image", **given}
    what = "text without a string" if kind == "text" else f"of the type {kind!r}, which xorl does not support"
    raise DataError(f"message {number}: content has a part that is {what}; supported: text and image")


def text_in(content: object) -> str:
    """The text of a message's content, of all its parts together."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)


def tool_call(call: object, number: int) -> dict[str, object]:
    """A call in OpenAI's format, with its arguments as an object, because templates write the JSON themselves."""
    location = f"message {number}: a tool call"
    if not isinstance(call, dict):
        raise DataError(f"{location} is {type(call).__name__}, want an object")
    check_part_masks(call, number)
    call = {str(key): value for key, value in call.items() if value is not None}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{location} has no function name")
    # Clients send null, an empty string or an empty object for a call without arguments.
    normalized = {"name": function["name"], "arguments": _json_object(function.get("arguments") or {}, location)}
    rest = {key: value for key, value in call.items() if key in ("id", "index")}
    return {**rest, "type": "function", "function": normalized}


def list_of_calls(value: object, location: str) -> list[object]:
    """One call, or several parallel calls: an object or a list of objects, or either as a JSON string."""
    if isinstance(value, str):
        value = parsed_json(value, location, "is a call that is not JSON")
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) for call in calls):
        wrong = next((type(call).__name__ for call in calls if not isinstance(call, dict)), "an empty list")
        raise DataError(f"{location} contains {wrong}, want a call or a list of calls: objects with name and arguments")
    return calls


def _json_object(value: object, location: str) -> dict[str, object]:
    if isinstance(value, str):
        value = parsed_json(value, location, "contains arguments that are not JSON")
    if not isinstance(value, dict):
        raise DataError(
            f"{location} contains {type(value).__name__}, want an object: the names and values of arguments"
        )
    return value
