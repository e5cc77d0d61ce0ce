"""Reads the contents and tool calls of messages, and JSON that a column or key holds as text."""

from __future__ import annotations

import json
from collections.abc import Sequence

from xorl.data.chunks import JSON_DECODER, DuplicateKeyError
from xorl.data.errors import DataError
from xorl.data.formats.masks import check_part_masks

_PART_KEYS = frozenset(("type", "text"))
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
            found |= _others(part, _PART_KEYS, "messages[].content[]")
        for call in _objects(message.get("tool_calls")):
            found |= _others(call, _CALL_KEYS, "messages[].tool_calls[]")
            for function in _objects([call.get("function")]):
                found |= _others(function, _FUNCTION_KEYS, "messages[].tool_calls[].function")
    return tuple(found)


def _objects(value: object) -> list[dict[object, object]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _others(item: dict[object, object], known: frozenset[str], location: str) -> dict[str, None]:
    return {f"{location}.{key}": None for key, value in item.items() if key not in known and value is not None}


def text_of(content: object, number: int, *, may_be_missing: bool) -> str:
    """The content as one string; a list of text parts is joined."""
    if content is None and may_be_missing:
        return ""
    if isinstance(content, list):
        for part in content:
            if isinstance(part, dict):
                check_part_masks(part, number)
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if parts and all(isinstance(part, str) for part in parts):
            return "".join(str(part) for part in parts)
        raise DataError(f"message {number}: content has parts that are not text, which xorl does not support")
    if not isinstance(content, str):
        raise DataError(
            f"message {number}: content is {'null' if content is None else type(content).__name__}, want a string"
        )
    return content


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
