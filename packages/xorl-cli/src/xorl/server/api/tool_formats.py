# ruff: noqa: RUF001  (some templates spell tokens with bars of full width)
"""The formats in which chat templates write tool calls: reads calls in answers, and makes samples follow a format."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec

from xorl.server.operations import CallTag, ToolCalls

# A call whose name is within its JSON.
_OBJECT = '{"name": "'
# Possessive, since several in a row would otherwise try all ways to share the blanks of a text.
_BLANKS = r"\s*+"
_ID_CHARS = string.ascii_letters + string.digits


class JsonSchema(NamedTuple):
    """A JSON schema, as JSON text. field: the request's name for it, for error messages."""

    text: str
    field: str


class ToolCall(NamedTuple):
    """A call of a function. arguments: a JSON object, as text."""

    name: str
    arguments: str


class Tags(NamedTuple):
    """Arguments as `before` name `between` value `after`, instead of as JSON."""

    before: str
    between: str
    after: str


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    A text with calls is `opening`, calls with `separator` between them, and `closing`. A call is `begin`, the name of
    the function, `middle`, the arguments and `end`. Models vary in blanks and new lines, so any number of them matches,
    also none. If `begin` ends in the key of the name in a JSON object, its keys may have any order, and the
    arguments are called arguments or parameters.

    trigger: the text with which calls begin, after other text; empty: calls are the whole answer. tags: how arguments
    are written; None: as JSON. call_id: ids of calls, which some templates write in place of names, with the fields
    name and index; None: nine random letters and digits, which every template accepts.
    """

    begin: str
    middle: str
    end: str
    opening: str = ""
    separator: str = ""
    closing: str = ""
    trigger: str = ""
    tags: Tags | None = None
    call_id: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """All fixed texts of the format, which may be special tokens."""
        return (self.opening, self.begin, self.middle, self.end, self.separator, self.closing, *(self.tags or ()))

    @property
    def has_objects(self) -> bool:
        """Whether a call is a JSON object with its name in it."""
        return self.begin.endswith(_OBJECT)

    def new_id(self, name: str, index: int) -> str:
        """An id for a call."""
        if self.call_id is not None:
            return self.call_id.format(name=name, index=index)
        return "".join(secrets.choice(_ID_CHARS) for _ in range(9))

    def constrained(
        self, schemas: Mapping[str, JsonSchema], *, is_required: bool, most: int | None, instead: JsonSchema | None
    ) -> ToolCalls | None:
        """The constraint for the sampler; None if the sampler cannot follow this format.

        schemas: of the functions' arguments, by name. is_required: there must be a call. instead: the schema of an
        answer without calls.
        """
        if self.tags is not None or not (is_required or self.trigger or instead):
            return None
        # The text contains the index of a call, which the sampler cannot count.
        most = 1 if self.call_id is not None or not (self.separator or self.trigger) else most
        tags = [
            CallTag(f"{self.begin}{name}{self.middle.replace('{index}', '0')}", schema.text, self.end, schema.field)
            for name, schema in schemas.items()
        ]
        trigger = None if is_required or instead is not None else self.trigger
        calls = ToolCalls(tuple(tags), self.opening, self.separator, self.closing, trigger, most)
        if is_required or instead is None:
            return calls
        return msgspec.structs.replace(calls, instead=instead.text, instead_field=instead.field)

    def head(self, names: Collection[str], *, is_first: bool) -> re.Pattern[str]:
        """Matches what comes before the JSON or the tags of a call of one of these functions."""
        begin = self.begin[: -len(_OBJECT)] if self.has_objects else self.begin
        longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        name = "" if self.has_objects else f"(?P<name>{longest_first}){_flexible(self.middle)}"
        before = [self.opening, "<|python_tag|>"] if is_first else [self.separator]
        optional = "|".join(_flexible(text) for text in before if text)
        after_previous = "" if is_first else rf"(?:{self._tail})?{_BLANKS}"
        return re.compile(rf"{_BLANKS}{after_previous}(?:{optional})?{_BLANKS}{_flexible(begin)}{name}{_BLANKS}")

    @property
    def _tail(self) -> str:
        return _flexible(self.end.removeprefix("}") if self.has_objects else self.end)

    @cached_property
    def _closing(self) -> re.Pattern[str]:
        return re.compile(rf"{_BLANKS}(?:{self._tail})?{_BLANKS}(?:{_flexible(self.closing)})?{_BLANKS}")

    def read_call(self, text: str, head: re.Match[str], schemas: Mapping[str, object]) -> tuple[ToolCall, int] | None:
        """The call after a head, and where its arguments end; None if there is no call, or not all of it yet.

        schemas: of the functions' arguments, by name.
        """
        try:
            if self.has_objects:
                call, end = json.JSONDecoder().raw_decode(text, head.end())
                name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
            else:
                name = head["name"]
                arguments, end = self._arguments(text, head.end(), schemas.get(name))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        # With a trigger, it is a call even if there is no such function, which agents report to the model.
        is_call = isinstance(name, str) and (name in schemas or (self.has_objects and self.trigger))
        if not is_call or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False)), end

    def end_of_calls(self, text: str, start: int) -> int:
        """Where the text after the last call begins. start: the end of that call's arguments."""
        found = self._closing.match(text, start)
        return start if found is None else found.end()

    def _arguments(self, text: str, start: int, schema: object) -> tuple[object, int]:
        """The arguments after a name. Raises ValueError if they are not complete."""
        if self.tags is None:
            return json.JSONDecoder().raw_decode(text, start)
        before, after = self.tags.before, self.tags.after.strip()
        between = re.compile(_flexible(self.tags.between.rstrip()))
        tail = re.compile(_BLANKS + self._tail)
        found: dict[str, object] = {}
        while tail.match(text, start) is None:
            key = text.index(before, start) + len(before)
            middle = between.search(text, key)
            if middle is None or text[start : key - len(before)].strip():
                raise ValueError("the call is not complete, or not one")
            end = text.index(after, middle.end())
            name, value = text[key : middle.start()].strip(), text[middle.end() : end]
            # The new lines around a value are not part of it, but its other blanks are.
            found[name] = _typed(value.removeprefix("\n").removesuffix("\n"), schema, name)
            start = end + len(after)
        return found, start


FORMATS = (
    ToolFormat(
        begin='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        end="}\n</tool_call>",
        separator="\n",
        trigger="<tool_call>",
    ),
    ToolFormat(
        begin="<tool_call>\n<function=",
        middle=">\n",
        end="</function>\n</tool_call>",
        separator="\n",
        trigger="<tool_call>",
        tags=Tags("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    ToolFormat(
        begin="<tool_call>",
        middle="\n",
        end="</tool_call>",
        trigger="<tool_call>",
        tags=Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    ToolFormat(
        opening="[TOOL_CALLS] [",
        begin='{"name": "',
        middle='", "arguments": ',
        end="}",
        separator=", ",
        closing="]",
        trigger="[TOOL_CALLS]",
    ),
    ToolFormat(begin="[TOOL_CALLS]", middle="[ARGS]", end="", trigger="[TOOL_CALLS]"),
    ToolFormat(begin="[TOOL_CALLS]", middle="", end="", trigger="[TOOL_CALLS]"),
    ToolFormat(
        opening="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        separator="\n",
        closing="<｜tool▁calls▁end｜>",
        trigger="<｜tool▁calls▁begin｜>",
    ),
    ToolFormat(
        opening="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>",
        middle="<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
        trigger="<｜tool▁calls▁begin｜>",
    ),
    ToolFormat(
        opening="<|tool_calls_section_begin|>",
        begin="<|tool_call_begin|>functions.",
        middle=":{index}<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        closing="<|tool_calls_section_end|>",
        trigger="<|tool_calls_section_begin|>",
        call_id="functions.{name}:{index}",
    ),
    ToolFormat(
        opening="<|tool_calls_section_begin|>",
        begin="<|tool_call_begin|>",
        middle="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        closing="<|tool_calls_section_end|>",
        trigger="<|tool_calls_section_begin|>",
    ),
    ToolFormat(
        begin="<|channel|>commentary to=functions.",
        middle=" <|constrain|>json<|message|>",
        end="<|call|>",
        trigger="<|channel|>commentary to=functions.",
    ),
    ToolFormat(
        begin=" to=functions.",
        middle="<|channel|>commentary json<|message|>",
        end="<|call|>",
        trigger=" to=functions.",
    ),
    ToolFormat(begin='Action: {"name": "', middle='", "arguments": ', end="}", trigger="Action: "),
    ToolFormat(begin='{"name": "', middle='", "parameters": ', end="}"),
    ToolFormat(begin='{"name": "', middle='", "arguments": ', end="}"),
    ToolFormat(begin="", middle="\n", end="", separator="<|assistant|>"),
)
"""The known formats. That of a template is the first one that can read a call which the template has written."""

PROBE = ToolCall("probe_tool", '{"key": "value"}')
"""The call with which the format of a template is found."""


def format_of(render: Callable[[str], str]) -> ToolFormat | None:
    """The format of a chat template's calls; None if it writes none, or uses an unknown format.

    render: the text that the template writes for an answer with the call PROBE, from the call's id; raises ValueError
    if the template rejects the answer.
    """
    for form in FORMATS:
        try:
            text = render(form.new_id(PROBE.name, 0))
        except ValueError:
            continue
        reader = CallReader(form, {PROBE.name: {}})
        reader.add(text, is_last=True)
        if reader.calls == [PROBE]:
            return form
    return None


class CallReader:
    """Reads the text of an answer as it grows: other text, and calls, each as soon as it is complete.

    Args:
        form: the format of the calls; None: the answer has none.
        schemas: of the arguments of the functions that may be called, by name.
    """

    def __init__(self, form: ToolFormat | None, schemas: Mapping[str, object]) -> None:
        self._form = form if schemas else None
        self._schemas = schemas
        self._heads = () if self._form is None else [self._form.head(schemas, is_first=one) for one in (False, True)]
        self._text = ""
        self._position = 0  # of the text that has not been returned
        self.calls: list[ToolCall] = []

    def add(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Add text; returns the new text that belongs to no call, and the new calls."""
        self._text += text
        if self._form is None:
            return self._take(len(self._text)), []
        content, num_calls = "", len(self.calls)
        start = self._position if self.calls else self._begin_of_calls(self._form, is_last=is_last)
        if not self.calls:
            # Blanks before a call do not belong to the text.
            content = self._take(len(self._text[:start].rstrip()))
        while head := self._heads[not self.calls].match(self._text, start):
            found = self._form.read_call(self._text, head, self._schemas)
            if found is None:
                break
            call, start = found
            self.calls.append(call)
            self._position = start
        if is_last:
            if self.calls:
                self._position = self._form.end_of_calls(self._text, self._position)
            content += self._take(len(self._text))
        return content, self.calls[num_calls:]

    def _take(self, end: int) -> str:
        taken = self._text[self._position : end]
        self._position = max(end, self._position)
        return taken

    def _begin_of_calls(self, form: ToolFormat, *, is_last: bool) -> int:
        """Where calls begin in the text, or may begin when it grows."""
        text = self._text
        if form.trigger:
            found = text.find(form.trigger)
            return found if found >= 0 else len(text) - (0 if is_last else _overlap(text, form.trigger))
        begun = text.lstrip()
        starts = ("{", "<|python_tag|>") if form.has_objects else tuple(self._schemas)
        return 0 if any(begun.startswith(start) or start.startswith(begun) for start in starts) else len(text)


def _overlap(text: str, trigger: str) -> int:
    """The length of the longest end of `text` with which `trigger` begins."""
    return next((n for n in range(min(len(text), len(trigger)), 0, -1) if text.endswith(trigger[:n])), 0)


def _flexible(text: str) -> str:
    """A pattern that matches the text with any blanks where it has some."""
    return _BLANKS.join(re.escape(part).replace(r"\{index\}", r"\d+") for part in re.split(r"\s+", text))


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _typed(text: str, schema: object, name: str) -> object:
    """The value of an argument that is written without quotes: a string, if its schema says so, or else JSON."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    own = properties.get(name) if isinstance(properties, dict) else None
    if isinstance(own, dict) and own.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
