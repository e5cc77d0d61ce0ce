"""Conversations: rows in the OpenAI and ShareGPT shapes become one list of messages, as templates expect it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from xorl.data.errors import DataError
from xorl.data.formats.template import Message

COLUMN_NAMES = ("messages", "conversations")
_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
_PLAIN_ROLES = frozenset(("system", "user", "assistant"))
# Who may speak after whom; None is the beginning.
_FOLLOWS: dict[str | None, tuple[str, ...]] = {
    None: ("system", "developer", "user"),
    "system": ("developer", "user"),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
_REASONING = ("reasoning_content", "thinking", "reasoning")
_OURS = ("train", "weight")


@dataclass(frozen=True)
class Conversation:
    """Messages as a template takes them. `trained` holds what each message says of itself by train or weight."""

    messages: list[Message]
    tools: list[object] | None
    trained: tuple[bool | None, ...]


def read_conversation(row: Mapping[str, object], columns: Mapping[str, str]) -> Conversation:
    """The conversation of a row. DataError, without the row's place, for one that cannot be meant."""
    value = _messages_of(row, columns)
    if not isinstance(value, list):
        raise DataError(f"the messages are {type(value).__name__}, want a list of them")
    if not value:
        raise DataError("the conversation is empty: it has no messages")
    read = [_message(item, number) for number, item in enumerate(value)]
    system = row.get(columns["system"]) if "system" in columns else None
    if system:
        if not isinstance(system, str):
            raise DataError(f"column {columns['system']!r} holds {type(system).__name__}, want a string")
        read.insert(0, ({"role": "system", "content": system}, None))
    messages = [message for message, _ in read]
    _check_order(messages)
    return Conversation(messages, _tools(row.get(columns.get("tools", "tools"))), tuple(flag for _, flag in read))


def _messages_of(row: Mapping[str, object], columns: Mapping[str, str]) -> object:
    names = (columns["messages"],) if "messages" in columns else COLUMN_NAMES
    for name in names:
        if row.get(name) is not None:
            value = row[name]
            if isinstance(value, str):
                try:
                    return json.loads(value)
                except json.JSONDecodeError as error:
                    raise DataError(f"column {name!r} is a string that is not JSON: {error.msg}") from error
            return value
    state = "is null" if any(name in row for name in names) else "does not exist"
    wanted = " or ".join(map(repr, names))
    raise DataError(f"column {wanted} {state}; the columns are: {', '.join(row) or 'none'} (columns: names another)")


def _message(item: object, number: int) -> tuple[Message, bool | None]:
    if not isinstance(item, dict):
        raise DataError(f"message {number} is {type(item).__name__}, want an object with role and content")
    spoken, said = item.get("role"), item.get("content")
    if len(item) == 2 and isinstance(said, str) and isinstance(spoken, str) and spoken in _PLAIN_ROLES:
        return {"role": spoken, "content": said}, None  # most messages are no more than that
    fields: dict[str, object] = {str(key): value for key, value in item.items() if value is not None}
    role_field, content_field = ("role", "content") if "role" in fields else ("from", "value")
    spoken = fields.pop(role_field, None)
    if not isinstance(spoken, str) or spoken not in _ROLES:
        shown = "no role" if spoken is None else f"the role {spoken!r}"
        raise DataError(f"message {number} has {shown}, want one of {', '.join(_ROLES)}")
    role = _ROLES[spoken]
    flag = _flag(fields, role, number)
    content = fields.pop(content_field, None)
    message: Message = {"role": role, **{key: value for key, value in fields.items() if key not in _OURS}}
    if spoken == "function_call":
        message["tool_calls"] = [_tool_call(_json_object(content, f"message {number}"), number)]
        content = None
    elif "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise DataError(f"message {number}: tool_calls is {type(calls).__name__}, want a list")
        message["tool_calls"] = [_tool_call(call, number) for call in calls]
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    content = _text(
        content, number, may_be_missing="tool_calls" in message or any(key in message for key in _REASONING)
    )
    message = {"role": role, "content": content, **{k: v for k, v in message.items() if k != "role"}}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise DataError(f"message {number}: its reasoning is {type(reasoning).__name__}, want a string")
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message, flag


def _flag(fields: Mapping[str, object], role: str, number: int) -> bool | None:
    """What a message says of being trained. Only the assistant's can: nobody else's text is predicted."""
    flags = [fields[name] for name in _OURS if name in fields]
    if not flags:
        return None
    flag = flags[0]
    if flag not in (0, 1) or any(other != flag for other in flags):
        raise DataError(f"message {number}: train and weight are true or false (1 or 0), got {flags}")
    if flag and role != "assistant":
        raise DataError(
            f"message {number} of role {role} asks to be trained; only the assistant's messages can be, or all tokens "
            "by train_on: all"
        )
    return bool(flag)


def _text(content: object, number: int, *, may_be_missing: bool) -> str:
    """The content as one string: it may come as a list of parts of text."""
    if content is None and may_be_missing:
        return ""
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if parts and all(isinstance(part, str) for part in parts):
            return "".join(str(part) for part in parts)
        raise DataError(f"message {number}: content has parts that are not text; xorl trains on text alone")
    if not isinstance(content, str):
        raise DataError(
            f"message {number}: content is {'null' if content is None else type(content).__name__}, want a string"
        )
    return content


def _tool_call(call: object, number: int) -> dict[str, object]:
    """A call in OpenAI's shape, its arguments as an object: templates write it as JSON themselves."""
    place = f"message {number}: a tool call"
    if not isinstance(call, dict):
        raise DataError(f"{place} is {type(call).__name__}, want an object")
    call = {str(key): value for key, value in call.items() if value is not None}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{place} has no function name")
    arguments = function.get("arguments", {})
    arguments = _json_object(arguments, place) if isinstance(arguments, str) else arguments
    named = {"name": function["name"], "arguments": arguments}
    rest = {key: value for key, value in call.items() if key in ("id", "index")}
    return {**rest, "type": "function", "function": named}


def _json_object(value: object, place: str) -> dict[str, object]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"{place} holds arguments that are not JSON: {error.msg}") from error
    if not isinstance(value, dict):
        raise DataError(f"{place} holds {type(value).__name__} where an object is wanted")
    return value


def _tools(value: object) -> list[object] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"the tools are a string that is not JSON: {error.msg}") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"the tools are {type(value).__name__}, want a list of objects")
    return value


def _check_order(messages: list[Message]) -> None:
    last: str | None = None
    for number, message in enumerate(messages):
        role = str(message["role"])
        if role not in _FOLLOWS[last]:
            before = "at the beginning" if last is None else f"after {last}"
            raise DataError(
                f"message {number} of role {role} stands {before}, want {' or '.join(_FOLLOWS[last])} there"
            )
        last = role
    if all(message["role"] != "assistant" for message in messages):
        raise DataError("the conversation has no assistant message: there is nothing to learn from it")
