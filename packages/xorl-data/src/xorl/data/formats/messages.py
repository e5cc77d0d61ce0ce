"""Conversations: converts rows in the OpenAI and ShareGPT formats to the list of messages that templates expect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from xorl.data.columns import TRAIN_KEYS
from xorl.data.errors import DataError
from xorl.data.formats.masks import train_flag
from xorl.data.formats.parts import content_of, list_of_calls, parsed_json, text_in, tool_call, unread_keys
from xorl.data.formats.template import Message

MESSAGE_COLUMNS = ("messages", "conversations")
# A conversation in two columns, as in TRL: only messages of the second are trained.
SPLIT_COLUMNS = ("prompt", "completion")
_KWARGS = "chat_template_kwargs"
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
# The roles that may follow each role; None is the start of the conversation.
_NEXT_ROLES: dict[str | None, tuple[str, ...]] = {
    None: ("system", "developer", "user"),
    "system": ("developer", "user"),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
REASONING = "reasoning_content"
_REASONING_FIELDS = (REASONING, "thinking", "reasoning")
# Message keys whose use does not depend on the template.
KNOWN_KEYS = frozenset(("role", "content", "tool_calls", *_REASONING_FIELDS))


@dataclass(frozen=True)
class Conversation:
    """Messages as templates expect them. `trained` tells whether to train each message, by its keys; None if unset.

    The first `num_prompt` messages are a prompt, which is not trained. `template_kwargs` are the row's own variables
    for the template. `unread` names the keys of parts and tool calls that are left out of `messages`.
    """

    messages: list[Message]
    tools: list[object] | None
    trained: tuple[bool | None, ...]
    num_prompt: int = 0
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    unread: tuple[str, ...] = ()


def message_columns(row: Mapping[str, object], columns: Mapping[str, str]) -> tuple[str, ...]:
    """The column with the row's messages, or the two of SPLIT_COLUMNS; if none has them, the expected names.

    Raises DataError if two columns each hold a conversation, since either could be the right one.
    """
    if "messages" in columns:
        return (columns["messages"],)
    found = [name for name in MESSAGE_COLUMNS if row.get(name) is not None]
    if len(found) > 1:
        raise DataError(
            f"columns {found[0]!r} and {found[1]!r} both have a conversation; set column_names to the one to read, "
            f"such as {{messages: {found[0]}}}"
        )
    split = tuple(columns.get(name, name) for name in SPLIT_COLUMNS)
    if not found and all(holds_messages(row.get(name)) for name in split):
        return split
    return tuple(found) or tuple(name for name in MESSAGE_COLUMNS if name in row) or MESSAGE_COLUMNS


def holds_messages(value: object) -> bool:
    """Whether a column holds messages rather than text: a list, or the JSON text of a list of messages."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return isinstance(value, list)
    try:
        items: object = json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        return False
    return isinstance(items, list) and any(items) and all(map(_is_message, items))


def _is_message(item: object) -> bool:
    return isinstance(item, dict) and not item.keys().isdisjoint(("role", "from"))


def read_conversation(
    row: Mapping[str, object], columns: Mapping[str, str], *, is_prompt: bool = False
) -> Conversation:
    """The conversation of a row. Raises DataError, without the location of the row, if it is invalid.

    `is_prompt`: it ends where the assistant is to answer, not with a message to train on.
    """
    names = message_columns(row, columns)
    is_split = len(names) == 2 and names != MESSAGE_COLUMNS
    parts: list[list[object]] = []
    for value in [_messages_of(row, (name,)) for name in names] if is_split else [_messages_of(row, names)]:
        if not isinstance(value, list):
            raise DataError(f"the messages are {type(value).__name__}, want a list")
        parts.append(value)
    if not any(parts):
        raise DataError("the conversation is empty: it has no messages")
    for name in ("system", "tools"):
        if name in columns and columns[name] not in row:
            raise DataError(
                f"column {columns[name]!r} (column_names: {name}) does not exist; the columns are: {', '.join(row)}"
            )
    items = list(chain.from_iterable(parts))
    read = [_message(item, number) for number, item in enumerate(items)]
    num_after = len(parts[1]) if is_split else len(read)
    _add_system(read, row, columns.get("system", "system"))
    messages = [message for message, _ in read]
    _check_order(messages, is_prompt=is_prompt)
    tools = _tools(row.get(columns.get("tools", "tools")))
    num_prompt = len(messages) - num_after if is_split else 0
    if True in (flags := [flag for _, flag in read])[:num_prompt]:
        raise DataError(
            f"message {flags.index(True)} is in column {names[0]!r}, which is not trained, but its key asks to train "
            f"it; move it and what follows it to {names[1]!r}, or remove the key"
        )
    return Conversation(
        messages,
        tools,
        tuple(flags),
        num_prompt=num_prompt,
        template_kwargs=_template_kwargs(row.get(_KWARGS)),
        unread=unread_keys(items),
    )


def api_variants(conversation: Conversation) -> Iterator[Conversation]:
    """Yields the conversation with tool calls as API clients send them, which is the only form some templates accept.

    Arguments are JSON strings; in the second variant, empty contents of calls are null too. Yields nothing without tool
    calls.
    """
    if not any("tool_calls" in message for message in conversation.messages):
        return
    for empty_content in ("", None):
        messages = [
            _api_message(message, empty_content) if "tool_calls" in message else message
            for message in conversation.messages
        ]
        yield replace(conversation, messages=messages)


def _api_message(message: Message, empty_content: str | None) -> Message:
    calls = message["tool_calls"]
    assert isinstance(calls, list), "made by _tool_call"
    functions = [call["function"] for call in calls]
    encoded = [{**each, "arguments": json.dumps(each["arguments"], ensure_ascii=False)} for each in functions]
    return {
        **message,
        "content": message["content"] or empty_content,
        "tool_calls": [{**call, "function": function} for call, function in zip(calls, encoded, strict=True)],
    }


def _add_system(read: list[tuple[Message, bool | None]], row: Mapping[str, object], column: str) -> None:
    """Inserts the system column as the first message, unless the conversation already begins with it."""
    system = row.get(column)
    if system is None or system == "":
        return
    if not isinstance(system, str):
        raise DataError(
            f"column {column!r} is {type(system).__name__}, want a string, the system message; set "
            "column_names to use another column"
        )
    first = read[0][0]
    if first["role"] != "system":
        read.insert(0, ({"role": "system", "content": system}, None))
    elif text_in(first["content"]) != system:
        raise DataError(f"message 0 is a system message, and column {column!r} has another one; remove one of them")


def _template_kwargs(value: object) -> Mapping[str, object]:
    if isinstance(value, str) and value.strip():
        value = parsed_json(value, f"column {_KWARGS!r}")
    if not value:
        return {}
    if not isinstance(value, dict):
        raise DataError(f"column {_KWARGS!r} is {type(value).__name__}, want an object: the template's variables")
    return {str(name): item for name, item in value.items() if item is not None}


def _messages_of(row: Mapping[str, object], names: tuple[str, ...]) -> object:
    for name in names:
        if row.get(name) is not None:
            value = row[name]
            return parsed_json(value, f"column {name!r}") if isinstance(value, str) else value
    state = "is null" if any(name in row for name in names) else "does not exist"
    wanted = " or ".join(map(repr, names))
    raise DataError(
        f"column {wanted} {state}; the columns are: {', '.join(row) or 'none'} (set column_names to use another one)"
    )


def _message(item: object, number: int) -> tuple[Message, bool | None]:
    if not isinstance(item, dict):
        raise DataError(f"message {number} is {type(item).__name__}, want an object with role and content")
    role_name, content = item.get("role"), item.get("content")
    if len(item) == 2 and isinstance(content, str) and isinstance(role_name, str) and role_name in _PLAIN_ROLES:
        return {"role": role_name, "content": content}, None  # a fast path for most messages
    fields: dict[str, object] = {str(key): value for key, value in item.items() if value is not None}
    role_field, content_field = ("role", "content") if "role" in fields else ("from", "value")
    if role_field == "from" and "from" in fields and "content" in fields:
        raise DataError(f"message {number} has content beside from; write role and content, or from and value")
    role_name = fields.pop(role_field, None)
    if not isinstance(role_name, str) or role_name not in _ROLES:
        shown = "no role" if role_name is None else f"the role {role_name!r}"
        raise DataError(f"message {number} has {shown}, want one of {', '.join(_ROLES)}")
    role = _ROLES[role_name]
    flag = _train_flag(fields, role, number)
    content = fields.pop(content_field, None)
    if role_name == "function_call":  # in ShareGPT's format, the content is the call
        fields["tool_calls"], content = list_of_calls(content, f"message {number}"), None
    _normalize_calls_(fields, number)
    may_be_missing = any(key in fields for key in ("tool_calls", *_REASONING_FIELDS))
    message: Message = {"role": role, "content": content_of(content, number, may_be_missing=may_be_missing)}
    message |= {key: value for key, value in fields.items() if key not in TRAIN_KEYS}
    reasonings = {key: message[key] for key in _REASONING_FIELDS if key in message}
    if reasonings:
        reasoning = next(iter(reasonings.values()))
        if not isinstance(reasoning, str):
            raise DataError(f"message {number}: its reasoning is {type(reasoning).__name__}, want a string")
        if any(other != reasoning for other in reasonings.values()):
            raise DataError(
                f"message {number} has different texts in {' and '.join(reasonings)}, which are names of the same; "
                "remove all but one"
            )
        message = {"thinking": reasoning, **message, REASONING: reasoning}
    return message, flag


def _normalize_calls_(fields: dict[str, object], number: int) -> None:
    """Converts tool calls, including OpenAI's older `function_call`, to `tool_calls`; removes an empty list."""
    if "function_call" in fields:
        if fields.get("tool_calls"):
            raise DataError(f"message {number} has both tool_calls and function_call; remove one of them")
        fields["tool_calls"] = list_of_calls(fields.pop("function_call"), f"message {number}: function_call")
    calls = fields.get("tool_calls", [])
    if not isinstance(calls, list):
        raise DataError(f"message {number}: tool_calls is {type(calls).__name__}, want a list")
    if calls:
        fields["tool_calls"] = [tool_call(call, number) for call in calls]
    else:
        fields.pop("tool_calls", None)


def _train_flag(fields: Mapping[str, object], role: str, number: int) -> bool | None:
    """Whether to train a message, by its keys. Only assistant messages can be trained: no others are predicted."""
    flag = train_flag(fields, number)
    if flag and role != "assistant":
        names = " and ".join(name for name in TRAIN_KEYS if name in fields)
        raise DataError(
            f"message {number} of role {role} sets {names}, but only assistant messages can be trained; remove "
            f"{names}, or train all tokens with train_on: all"
        )
    return flag


def _tools(value: object) -> list[object] | None:
    if isinstance(value, str) and value.strip():
        value = parsed_json(value, "the column of tools")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"the tools are {type(value).__name__}, want a list of objects")
    return value


def _check_order(messages: list[Message], *, is_prompt: bool) -> None:
    last: str | None = None
    for number, message in enumerate(messages):
        role = str(message["role"])
        if role not in _NEXT_ROLES[last]:
            before = "at the start" if last is None else f"after {last}"
            raise DataError(f"message {number} has role {role} {before}, want {' or '.join(_NEXT_ROLES[last])} there")
        last = role
    if is_prompt:
        if last not in ("user", "tool"):
            raise DataError(f"the last message has role {last}, want user or tool: the assistant answers it")
    elif all(message["role"] != "assistant" for message in messages):
        raise DataError("the conversation has no assistant message, so there is nothing to train on")
