"""Chat templates: Jinja in a sandbox, with the names and settings that templates of the Hugging Face Hub expect.

This file renders messages; turns.py decides which part of the text is trained.
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
# Unicode noncharacters, which exchanged text must not contain: they mark the content of {% generation %}.
_START, _END = "\ufdd0", "\ufdd1"
# The function with which templates ask for the date, and the date they always get.
_DAY = "strftime_now"
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}
_MARKS = re.compile(f"[{_START}{_END}]")
# What the sandbox always allows: everything but internals, str.format and methods that change a list or a dict.
_HARMLESS = frozenset(
    (kind, name)
    for kind, example in ((str, ""), (list, []), (dict, {}), (LoopContext, None))
    for name in dir(kind)
    if name[0] != "_" and name not in ("format", "format_map") and not modifies_known_mutable(example, name)
)


class TemplateRefusal(Exception):
    """A template refuses the messages or fails on them; the message is for the user."""


class ChatTemplate:
    """A compiled template with the special tokens it may name, and `kwargs`, variables of its own.

    `marks_generation` says that the template itself marks the model's text with {% generation %}. `variables` are the
    names that kwargs may set, among them strftime_now, for which a date stands.
    """

    def __init__(
        self, source: str, special: Mapping[str, object], name: str, kwargs: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        self.source = source
        self.name = name
        environment = sandbox()
        self._asked_for_day = False
        self._day = _day_of(kwargs.get(_DAY))
        self._names = {**environment.globals, **special, **kwargs, _DAY: self._format_day}
        try:
            self._compiled = environment.from_string(source)
            read = meta.find_undeclared_variables(environment.parse(source))
            self.variables = frozenset(read - special.keys() - environment.globals.keys() - _GIVEN)
        except TemplateSyntaxError as error:
            raise DataError(
                f"{name}, line {error.lineno}: the chat template has a syntax error: {error.message}"
            ) from (error)
        self.marks_generation = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None

    @property
    def writes_the_day(self) -> bool:
        """Whether it writes the current date, as far as a short conversation shows."""
        self._asked_for_day = False
        with suppress(TemplateRefusal):
            self.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None)
        return self._asked_for_day and self._day is None

    def _format_day(self, form: str) -> str:
        self._asked_for_day = True
        return (self._day or datetime.now()).strftime(form)

    def render(
        self, messages: Sequence[Message], tools: Sequence[object] | None, *, add_generation_prompt: bool = False
    ) -> str:
        """The text of `messages`. TemplateRefusal if the template does not accept them."""
        text = self._render(messages, tools, add_generation_prompt=add_generation_prompt)
        return _MARKS.sub("", text) if self.marks_generation else text

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[object] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of `messages` and the character ranges of the template's generation blocks in it."""
        if _MARKS.search(json.dumps([list(messages), tools], ensure_ascii=False)):
            raise TemplateRefusal("a message holds U+FDD0 or U+FDD1, which are no characters")
        text = self._render(messages, tools, add_generation_prompt=False)
        spans: list[tuple[int, int]] = []
        start = 0
        for num_marks, mark in enumerate(_MARKS.finditer(text)):
            place = mark.start() - num_marks
            if mark.group() == _START:
                start = place
            else:
                spans.append((start, place))
        return _MARKS.sub("", text), [(start, stop) for start, stop in spans if start < stop]

    def _render(
        self, messages: Sequence[Message], tools: Sequence[object] | None, *, add_generation_prompt: bool
    ) -> str:
        names = {
            **self._names,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            # Template.render rebuilds these names from three mappings each time, which takes a third of a short
            # template's time.
            return "".join(self._compiled.root_render_func(self._compiled.new_context(names, shared=True)))
        except TemplateError as error:
            raise TemplateRefusal(str(error.message or error)) from error
        # A template is third-party code: it may raise any exception on a message.
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
    """The template that `value` names: a file, one of the tokenizer's templates, or (None) the tokenizer's default.

    `kwargs` are variables for it. DataError if there is none, or its syntax is wrong.
    """
    templates = tokenizer.templates
    place = f"the tokenizer in {tokenizer.folder}"
    if value is None:
        name = "tool_use" if with_tools and "tool_use" in templates else "default"
        if name not in templates:
            others = f"; it has templates of other names: {', '.join(templates)}" if templates else ""
            raise DataError(
                f"model.tokenizer_path: {place} has no chat template{others}. Set {option} to a template's "
                "file (Jinja), or use the tokenizer of a chat model"
            )
        return ChatTemplate(templates[name], tokenizer.special, f"{place}, chat template", kwargs)
    if value in templates:
        return ChatTemplate(templates[value], tokenizer.special, f"{place}, chat template {value}", kwargs)
    path = Path(value).expanduser()
    if not path.is_file():
        named = f"; the tokenizer's templates are: {', '.join(templates)}" if templates else ""
        raise DataError(f"{option}: {value} is no file (looked at {path.absolute()}){named}")
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{option}: {path} cannot be read as UTF-8 text: {error}") from error
    return ChatTemplate(source, tokenizer.special, str(path), kwargs)


def _day_of(value: object) -> datetime | None:
    if value is None:
        return None
    try:
        return datetime.fromisoformat(str(value))
    except ValueError as error:
        raise DataError(f"chat_template_kwargs: {_DAY}: {value}, want a day such as 2026-01-31") from error


class _GenerationBlocks(Extension):
    """{% generation %} ... {% endgeneration %}: puts marks around the text that the model writes."""

    tags = {"generation"}  # noqa: RUF012  (jinja's name and type)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        return f"{_START}{caller()}{_END}"


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with a fast path for the most frequent reads: the same result, several times faster."""

    def getattr(self, obj: object, attribute: str) -> object:
        if (type(obj), attribute) in _HARMLESS:
            return getattr(obj, attribute)
        if type(obj) is dict and not hasattr(dict, attribute):
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def sandbox() -> ImmutableSandboxedEnvironment:
    """The environment in which templates run."""
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
    """Plain JSON, as templates expect; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
