"""Chat templates: Jinja in a sandbox, with the variables and settings that templates of the Hugging Face Hub expect.

This file renders messages; turns.py selects the trained part of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable

from xorl.data.errors import DataError
from xorl.data.formats.tokenizer import TextTokenizer

Message = dict[str, object]
# Put around the content of {% generation %}: Unicode noncharacters, which do not occur in text.
_START, _END = "\ufdd0", "\ufdd1"
# The function that templates call for the current date, and the option that fixes the date.
_DATE = "strftime_now"
_STANDARD_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt"}
_MARKS = re.compile(f"[{_START}{_END}]")
# Attributes that the sandbox always allows: all but internals, str.format and methods that change a list or a dict.
_ALLOWED_ATTRIBUTES = frozenset(
    (kind, name)
    for kind, example in ((str, ""), (list, []), (dict, {}), (LoopContext, None))
    for name in dir(kind)
    if name[0] != "_" and name not in ("format", "format_map") and not modifies_known_mutable(example, name)
)


class TemplateRefusal(Exception):
    """A template rejects the messages or fails on them."""


class ChatTemplate:
    """A compiled template. `special` are the special tokens and `kwargs` other variables that it may use.

    `marks_generation`: the template itself marks the model's text with {% generation %}. `variables` are the names that
    `kwargs` may set; the value of strftime_now is a date. `mentioned` are the strings and attribute names in the
    template.
    """

    def __init__(
        self, source: str, special: Mapping[str, object], name: str, kwargs: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        self.source = source
        self.name = name
        environment = sandbox()
        self._called_date = False
        self._fixed_date = _parse_date(kwargs.get(_DATE))
        self._variables = {**environment.globals, **special, **kwargs, _DATE: self._format_date}
        try:
            self._compiled = environment.from_string(source)
            tree = environment.parse(source)
            names = meta.find_undeclared_variables(tree)
            self.variables = frozenset(names - special.keys() - environment.globals.keys() - _STANDARD_VARIABLES)
            self.mentioned = _mentioned(tree)
        except TemplateSyntaxError as error:
            raise DataError(
                f"{name}, line {error.lineno}: the chat template has a syntax error: {error.message}"
            ) from error
        self.marks_generation = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None

    @property
    def uses_current_date(self) -> bool:
        """Whether the template writes the current date; tested with a short conversation."""
        self._called_date = False
        with suppress(TemplateRefusal):
            self.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None)
        return self._called_date and self._fixed_date is None

    def _format_date(self, date_format: str) -> str:
        self._called_date = True
        return (self._fixed_date or datetime.now()).strftime(date_format)

    def render(
        self, messages: Sequence[Message], tools: Sequence[object] | None, *, add_generation_prompt: bool = False
    ) -> str:
        """The text of `messages`. Raises TemplateRefusal if the template rejects them."""
        text = self._render(messages, tools, add_generation_prompt=add_generation_prompt)
        return _MARKS.sub("", text) if self.marks_generation else text

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[object] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of `messages`, and the character ranges of its generation blocks."""
        if _MARKS.search(json.dumps([list(messages), tools], ensure_ascii=False)):
            raise TemplateRefusal("a message contains U+FDD0 or U+FDD1, which are not characters")
        text = self._render(messages, tools, add_generation_prompt=False)
        spans: list[tuple[int, int]] = []
        start = 0
        for num_marks, mark in enumerate(_MARKS.finditer(text)):
            offset = mark.start() - num_marks
            if mark.group() == _START:
                start = offset
            else:
                spans.append((start, offset))
        return _MARKS.sub("", text), [(start, stop) for start, stop in spans if start < stop]

    def _render(
        self, messages: Sequence[Message], tools: Sequence[object] | None, *, add_generation_prompt: bool
    ) -> str:
        variables = {
            **self._variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            # Template.render merges the variables from three mappings on each call, which takes a third of the time of
            # a short template.
            return "".join(self._compiled.root_render_func(self._compiled.new_context(variables, shared=True)))
        except TemplateError as error:
            raise TemplateRefusal(str(error.message or error)) from error
        # Templates are third-party code and may raise any of these on a message.
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            raise TemplateRefusal(f"{type(error).__name__}: {error}") from error


def load_template(
    option: str,
    value: str | None,
    tokenizer: TextTokenizer,
    *,
    with_tools: bool,
    kwargs: Mapping[str, object] = MappingProxyType({}),
) -> ChatTemplate:
    """Loads the template `value`: a file, one of the tokenizer's templates by name, or (None) the tokenizer's default.

    `kwargs` are variables for it. Raises DataError if it does not exist or has a syntax error.
    """
    templates = tokenizer.templates
    owner = f"the tokenizer in {tokenizer.folder}"
    if value is None:
        name = "tool_use" if with_tools and "tool_use" in templates else "default"
        if name not in templates:
            others = f" named default; its templates are: {', '.join(templates)}" if templates else ""
            raise DataError(
                f"tokenizer_folder: {owner} has no chat template{others}. Set {option} to a Jinja template file, "
                "or use the tokenizer of a chat model"
            )
        return ChatTemplate(templates[name], tokenizer.special, f"{owner}, chat template", kwargs)
    if value in templates:
        return ChatTemplate(templates[value], tokenizer.special, f"{owner}, chat template {value}", kwargs)
    path = Path(value).expanduser()
    if not path.is_file():
        names = f"; the tokenizer's templates are: {', '.join(templates)}" if templates else ""
        raise DataError(f"{option}: {value} is not a file (looked at {path.absolute()}){names}")
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{option}: {path} cannot be read as UTF-8 text: {error}") from error
    return ChatTemplate(source, tokenizer.special, str(path), kwargs)


def _mentioned(tree: nodes.Template) -> frozenset[str]:
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    return frozenset(attributes | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)})


def _parse_date(value: object) -> datetime | None:
    if value is None:
        return None
    try:
        return datetime.fromisoformat(str(value))
    except ValueError as error:
        raise DataError(f"chat_template_kwargs: {_DATE}: {value}, want a date such as 2026-01-31") from error


class _GenerationBlocks(Extension):
    """{% generation %} ... {% endgeneration %}: puts marks around the text that the model generates."""

    tags = {"generation"}  # noqa: RUF012  (the name and type are Jinja's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        return f"{_START}{caller()}{_END}"


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with a fast path for the most common attribute reads, which returns the same results."""

    def getattr(self, obj: object, attribute: str) -> object:
        if (type(obj), attribute) in _ALLOWED_ATTRIBUTES:
            return getattr(obj, attribute)
        if type(obj) is dict and not hasattr(dict, attribute):
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def sandbox() -> ImmutableSandboxedEnvironment:
    """The sandboxed environment in which templates run."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, as templates expect; Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
