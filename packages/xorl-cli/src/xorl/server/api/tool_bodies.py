"""Tools, the choice among them, and the format of the answer, in requests of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from xorl.server.api.openai_fields import msgspec_of
from xorl.server.api.responses import InvalidField
from xorl.server.api.tool_formats import JsonSchema, ToolFormat
from xorl.server.operations import AnswerForm, JsonAnswer

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_ANY_OBJECT = '{"type":"object"}'
_FORMAT_TYPES = ("text", "json_object", "json_schema")


class FunctionJson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call. strict: its calls must have arguments that `parameters` allows."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolJson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool of a chat completion."""

    type: Literal["function"]
    function: FunctionJson


class JsonSchemaJson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The schema of an answer. `strict` changes nothing: answers always follow the schema."""

    schema: dict[str, Any]
    name: str = "answer"
    description: str | None = None
    strict: bool | None = None


class FormatJson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`response_format` of a chat completion."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaJson | None = None


@dataclass(frozen=True)
class Tools:
    """The functions that the model may call, by name, and which it must call: any, none in particular, or one by name.

    is_parallel: whether an answer may have several calls.
    """

    functions: Mapping[str, FunctionJson]
    choice: Literal["auto", "required"] | FunctionJson
    is_parallel: bool

    @property
    def definitions(self) -> list[object]:
        """The functions as chat templates show them to the model."""
        return [
            {
                "type": "function",
                "function": {
                    name: value
                    for name in ("name", "description", "parameters")
                    if (value := getattr(function, name)) is not None
                },
            }
            for function in self.functions.values()
        ]

    @property
    def schemas(self) -> dict[str, object]:
        """The schemas of the functions' arguments."""
        return {name: function.parameters or {} for name, function in self.functions.items()}

    def form(self, calls: ToolFormat, answer_schema: JsonSchema | None) -> AnswerForm | None:
        """The constraint on the answer, whose calls are written as `calls`; None: any text.

        answer_schema: of an answer without calls. Raises InvalidField if the sampler cannot keep the answer to it.
        """
        is_required = self.choice != "auto"
        fields = {name: f"tools[{index}].function" for index, name in enumerate(self.functions)}
        strict = next((name for name, function in self.functions.items() if function.strict), None)
        if not is_required and strict is None and self.is_parallel and answer_schema is None:
            return None
        chosen = [self.choice] if isinstance(self.choice, FunctionJson) else self.functions.values()
        form = calls.constrained(
            {one.name: _arguments_schema(one, f"{fields[one.name]}.parameters") for one in chosen},
            is_required=is_required,
            most=None if self.is_parallel and not isinstance(self.choice, FunctionJson) else 1,
            instead=answer_schema,
        )
        if form is not None:
            return form
        problem = (
            "needs a model whose chat template marks where calls begin, and writes arguments as JSON; leave it out"
        )
        if is_required:
            raise InvalidField("tool_choice", f"other than auto {problem}", "unsupported_parameter")
        if answer_schema is not None:
            raise InvalidField("response_format", f"with tools {problem}", "unsupported_parameter")
        name = "parallel_tool_calls" if strict is None else f"{fields[strict]}.strict"
        raise InvalidField(name, problem, "unsupported_parameter")


def read_tools(given: Sequence[dict[str, Any]], choice: object, is_parallel: bool | None) -> Tools | None:
    """The tools of a request; None if the model may call none. Raises InvalidField."""
    functions: dict[str, FunctionJson] = {}
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        if tool.get("type") != "function":
            raise InvalidField(f"{where}.type", "must be function, others are not supported", "unsupported_parameter")
        function = msgspec_of(tool, ToolJson, f"{where}.").function
        if not _NAME.fullmatch(function.name):
            requirement = "must be 1 to 128 letters, digits, dots, dashes and underscores"
            raise InvalidField(f"{where}.function.name", f"{requirement}, got {function.name[:200]!r}")
        if function.name in functions:
            raise InvalidField(
                f"{where}.function.name", f"is {function.name}, which is also the name of an earlier tool"
            )
        if (function.parameters or {}).get("type", "object") != "object":
            raise InvalidField(f"{where}.function.parameters", "must be a schema of type object")
        functions[function.name] = function
    chosen = _choice(choice, functions)
    return None if chosen == "none" or not functions else Tools(functions, chosen, is_parallel is not False)


def read_format(given: dict[str, Any] | None) -> JsonSchema | None:
    """The schema of an answer; None: the answer is any text. Raises InvalidField."""
    if given is None:
        return None
    if "type" in given and given["type"] not in _FORMAT_TYPES:
        raise InvalidField("response_format.type", f"must be one of {', '.join(_FORMAT_TYPES)}")
    asked = msgspec_of(given, FormatJson, "response_format.")
    if asked.type == "json_object":
        return JsonSchema(_ANY_OBJECT, "response_format")
    if asked.type == "json_schema" and asked.json_schema is None:
        raise InvalidField("response_format.json_schema", "is missing", "missing_required_parameter")
    if asked.json_schema is None:
        return None
    return JsonSchema(msgspec.json.encode(asked.json_schema.schema).decode(), "response_format.json_schema.schema")


def answer_form(tools: Tools | None, calls: ToolFormat | None, answer_schema: JsonSchema | None) -> AnswerForm | None:
    """The constraint on an answer; None: any text. calls: how the chat template writes them, if there are tools."""
    if tools is not None:
        assert calls is not None, "without it, tools have been refused"
        return tools.form(calls, answer_schema)
    return None if answer_schema is None else JsonAnswer(*answer_schema)


def _choice(given: object, functions: Mapping[str, FunctionJson]) -> Literal["auto", "none", "required"] | FunctionJson:
    match given:
        case None | "auto":
            return "auto"
        case "none":
            return "none"
        case "required" if functions:
            return "required"
        case {"type": "function", "function": {"name": str(name)}} if name in functions:
            return functions[name]
        case "required" | {"type": "function"} if not functions:
            raise InvalidField("tool_choice", "other than none and auto needs tools")
        case {"type": "function"}:
            raise InvalidField("tool_choice", f"must be one of the functions in tools: {', '.join(functions)}")
        case _:
            forms = 'auto, none, required or {"type": "function", "function": {"name": ...}}'
            raise InvalidField("tool_choice", f"must be {forms}", "unsupported_parameter")


def _arguments_schema(function: FunctionJson, field: str) -> JsonSchema:
    # Arguments are an object even if the schema does not say so.
    return JsonSchema(msgspec.json.encode({**(function.parameters or {}), "type": "object"}).decode(), field)
