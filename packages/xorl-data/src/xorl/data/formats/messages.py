"""Conversations: converts rows of the OpenAI and ShareGPT shapes to one list of messages, as templates expect it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

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
# Which role may follow which; None is the beginning.
_FOLLOWS: dict[str | None, tuple[str, ...]] = {
    None: ("system", "developer", "user"),
    "system": ("developer", "user"),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
REASONING = "reasoning_content"
_REASONING = (REASONING, "thinking", "reasoning")
_OURS = ("train", "weight")


@dataclass(frozen=True)
class Conversation:
    """Messages in the form that templates expect. `trained` holds each message's own train or weight field."""

    messages: list[Message]
    tools: list[object] | None
    trained: tuple[bool | None, ...]


def read_conversation(row: Mapping[str, object], columns: Mapping[str, str]) -> Conversation:
    """The conversation of a row. DataError, without the row's place, for an invalid one."""
    value = _messages_of(row, columns)
    if not isinstance(value, list):
        raise DataError(f"the messages are {type(value).__name__}, want a list of them")
    if not value:
        raise DataError("the conversation is empty: it has no messages")
    for name in ("system", "tools"):
        if name in columns and columns[name] not in row:
            raise DataError(f"column {columns[name]!r} (columns: {name}) does not exist; there are: {', '.join(row)}")
    read = [_message(item, number) for number, item in enumerate(value)]
    _add_system(read, row, columns.get("system", "system"))
    messages = [message for message, _ in read]
    _check_order(messages)
    return Conversation(messages, _tools(row.get(columns.get("tools", "tools"))), tuple(flag for _, flag in read))


def as_sent(conversation: Conversation) -> Iterator[Conversation]:
    """The same with tool calls in the API's form: arguments as JSON strings; then also with null contents beside them.

    Some templates accept no other form. Empty without tool calls.
    """
    if not any("tool_calls" in message for message in conversation.messages):
        return
    for silence in ("", None):
        messages = [
            _as_sent(message, silence) if "tool_calls" in message else message for message in conversation.messages
        ]
        yield replace(conversation, messages=messages)


def _as_sent(message: Message, silence: str | None) -> Message:
    calls = message["tool_calls"]
    assert isinstance(calls, list), "made by _tool_call"
    named = [call["function"] for call in calls]
    sent = [{**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)} for function in named]
    return {
        **message,
        "content": message["content"] or silence,
        "tool_calls": [{**call, "function": function} for call, function in zip(calls, sent, strict=True)],
    }


def _add_system(read: list[tuple[Message, bool | None]], row: Mapping[str, object], column: str) -> None:
    """Inserts the text of the system column at the beginning, unless the conversation already begins with it."""
    system = row.get(column)
    if system is None or system == "":
        return
    if not isinstance(system, str):
        raise DataError(
            f"column {column!r} holds {type(system).__name__}, want a string, the system message (columns: system "
            "names another)"
        )
    first = read[0][0]
    if first["role"] != "system":
        read.insert(0, ({"role": "system", "content": system}, None))
    elif first["content"] != system:
        raise DataError(f"message 0 is a system message, and column {column!r} holds another; take one out")


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
        return {"role": spoken, "content": said}, None  # true of most messages
    fields: dict[str, object] = {str(key): value for key, value in item.items() if value is not None}
    role_field, content_field = ("role", "content") if "role" in fields else ("from", "value")
    spoken = fields.pop(role_field, None)
    if not isinstance(spoken, str) or spoken not in _ROLES:
        shown = "no role" if spoken is None else f"the role {spoken!r}"
        raise DataError(f"message {number} has {shown}, want one of {', '.join(_ROLES)}")
    role = _ROLES[spoken]
    flag = _flag(fields, role, number)
    content = fields.pop(content_field, None)
    if spoken == "function_call":  # a ShareGPT call: its content is the call
        fields["tool_calls"], content = [_json_object(content, f"message {number}")], None
    _read_calls_(fields, number)
    may_be_missing = any(key in fields for key in ("tool_calls", *_REASONING))
    message: Message = {"role": role, "content": _text(content, number, may_be_missing=may_be_missing)}
    message |= {key: value for key, value in fields.items() if key not in _OURS}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise DataError(f"message {number}: its reasoning is {type(reasoning).__name__}, want a string")
        message = {"thinking": reasoning, **message, REASONING: reasoning}
    return message, flag


def _read_calls_(fields: dict[str, object], number: int) -> None:
    """Converts tool calls, also OpenAI's older `function_call`, to one shape in `tool_calls`; absent if none."""
    if "function_call" in fields:
        if fields.get("tool_calls"):
            raise DataError(f"message {number} has both tool_calls and function_call; leave one out")
        fields["tool_calls"] = [fields.pop("function_call")]
    calls = fields.get("tool_calls", [])
    if not isinstance(calls, list):
        raise DataError(f"message {number}: tool_calls is {type(calls).__name__}, want a list")
    if calls:
        fields["tool_calls"] = [_tool_call(call, number) for call in calls]
    else:
        fields.pop("tool_calls", None)


def _flag(fields: Mapping[str, object], role: str, number: int) -> bool | None:
    """A message's own flag for training. Only assistant messages can have one: no other role is predicted."""
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
    """The content as one string; the input may be a list of text parts."""
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
    """A call in OpenAI's shape, with its arguments as an object: templates write the JSON themselves."""
    place = f"message {number}: a tool call"
    if not isinstance(call, dict):
        raise DataError(f"{place} is {type(call).__name__}, want an object")
    call = {str(key): value for key, value in call.items() if value is not None}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{place} has no function name")
    # Programs send null, an empty string or an empty object for a call without arguments.
    named = {"name": function["name"], "arguments": _json_object(function.get("arguments") or {}, place)}
    rest = {key: value for key, value in call.items() if key in ("id", "index")}
    return {**rest, "type": "function", "function": named}


def _json_object(value: object, place: str) -> dict[str, object]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"{place} holds arguments that are not JSON: {error.msg}") from error
    if not isinstance(value, dict):
        raise DataError(f"{place} holds {type(value).__name__}, want an object: the names and values of arguments")
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
