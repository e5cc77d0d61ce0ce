"""Parses YAML text into a tree whose nodes record their position in the source.

The rules are those of the YAML 1.2 core schema: `1e-5` is a number, `no` and `1_000` are strings, and a duplicate key
is an error. Scalars are resolved here because the rules of the YAML library are more permissive.
"""

import copy
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from xorl.config.environment import substitute
from xorl.config.problems import Origin, Problem, hide_secrets

Scalar = None | bool | int | float | str
Plain = Scalar | list["Plain"] | dict[str, "Plain"]

STRING_TAG = "tag:yaml.org,2002:str"
CONSTANTS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
NUMBERS: tuple[tuple[re.Pattern[str], Callable[[str], Scalar]], ...] = (
    (re.compile(r"[-+]?[0-9]{1,4000}"), int),
    (re.compile(r"0o[0-7]+"), lambda text: int(text[2:], 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), lambda text: int(text[2:], 16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)


@dataclass
class Node:
    """A value and its position in the source; for an entry of a mapping, the position of its key.

    `written` is the text of a scalar before its variables (`${NAME}`) were expanded, or None if it has none.
    """

    value: "Scalar | list[Node] | dict[str, Node]"
    origin: Origin
    written: str | None = None

    def plain(self, *, expanded: bool = True) -> Plain:
        """Returns the value without positions, with variables expanded or as written."""
        if isinstance(self.value, list):
            return [item.plain(expanded=expanded) for item in self.value]
        if isinstance(self.value, dict):
            return {key: item.plain(expanded=expanded) for key, item in self.value.items()}
        return self.value if expanded or self.written is None else self.written

    def expanded(self) -> "Iterator[Node]":
        """Yields this node and those below it whose variables were expanded."""
        below = self.value.values() if isinstance(self.value, dict) else self.value
        if isinstance(below, Iterable) and not isinstance(below, str):
            for item in below:
                yield from item.expanded()
        elif self.written is not None:
            yield self

    def find(self, path: Sequence[str | int]) -> "Node | None":
        """Returns the node at a path, or None."""
        nodes = self._along(path)
        return nodes[-1] if len(nodes) > len(path) else None

    def nearest(self, path: Sequence[str | int]) -> "Node":
        """Returns the node at a path, or its closest existing ancestor."""
        return self._along(path)[-1]

    def _along(self, path: Sequence[str | int]) -> "list[Node]":
        """Returns the nodes along a path as far as they exist, starting with this one."""
        nodes: list[Node] = [self]
        for part in path:
            value = nodes[-1].value
            if isinstance(value, dict) and str(part) in value:
                nodes.append(value[str(part)])
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                nodes.append(value[part])
            else:
                break
        return nodes


@dataclass
class ParsedDocument:
    """The result of parsing: the tree (None for empty text or invalid YAML) and the problems."""

    root: Node | None
    problems: list[Problem] = field(default_factory=list)


def read_document(text: str, name: str, secrets: Collection[str] = ()) -> ParsedDocument:
    """Parses the text of a file.

    Positions cite the file as `name` and mask the values of the options in `secrets`.
    """
    lines = text.splitlines()

    def origin_of(line: int) -> Origin:
        shown = hide_secrets(lines[line], secrets) if line < len(lines) else ""
        return Origin("file", f"{name}:{line + 1}", shown, line + 1)

    return _read(text, origin_of)


def read_value(text: str, origin: Origin) -> ParsedDocument:
    """Parses the text of a single value; all its nodes get the same origin."""
    return _read(text, lambda line: origin)


def node_of(value: object, origin: Origin) -> Node:
    """Builds a tree from Python data; paths become strings."""
    if isinstance(value, Mapping):
        return Node({str(key): node_of(item, origin) for key, item in value.items()}, origin)
    if isinstance(value, list | tuple):
        return Node([node_of(item, origin) for item in value], origin)
    if isinstance(value, os.PathLike):
        return Node(os.fspath(value), origin)
    if value is None or isinstance(value, bool | int | float | str):
        return Node(value, origin)
    raise TypeError(
        f"expected a mapping, list, string, number, boolean, path or None in a configuration, got {value!r}"
    )


def resolve_scalar(text: str) -> Scalar:
    """Returns the YAML 1.2 value of an unquoted scalar."""
    if text in CONSTANTS:
        return CONSTANTS[text]
    for pattern, convert in NUMBERS:
        if pattern.fullmatch(text):
            return convert(text)
    return text


def _read(text: str, origin_of: Callable[[int], Origin]) -> ParsedDocument:
    builder = _Builder(origin_of)
    try:
        root = builder.document(YAML(typ="safe", pure=True).parse(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        origin = origin_of(mark.line if mark else 0)
        return ParsedDocument(None, [Problem(origin, "", _syntax_message(error, origin))])
    except YAMLError as error:
        return ParsedDocument(None, [Problem(origin_of(0), "", f"invalid YAML: {str(error).splitlines()[0]}")])
    return ParsedDocument(root, builder.problems)


def _syntax_message(error: MarkedYAMLError, origin: Origin) -> str:
    context = f" {error.context}" if error.context else ""
    problem = str(error.problem).splitlines()[0]
    message = f"invalid YAML: {problem}{context}"
    if "escape" in problem:
        message += "\nin double quotes, \\ starts an escape sequence: write \\\\ for a backslash, or use single quotes"
    elif "${" in origin.text:
        message += '\ninside [...] and {...} put quotes around a variable: "${NAME}"'
    elif "\t" in origin.text:
        message += "\nindent with spaces, not tabs"
    elif origin.kind == "override":
        message += "\nput quotes inside the quotes for text: '\"...\"'"
    return message


class _Builder:
    """Builds a tree from the events of one YAML document."""

    def __init__(self, origin_of: Callable[[int], Origin]) -> None:
        self.origin_of = origin_of
        self.problems: list[Problem] = []
        self.anchors: dict[str, Node] = {}
        self.events: Iterator[Event] = iter(())

    def document(self, events: Iterator[Event]) -> Node | None:
        self.events = (
            event
            for event in events
            if isinstance(event, NodeEvent | MappingEndEvent | SequenceEndEvent | DocumentStartEvent)
        )
        root: Node | None = None
        for event in self.events:
            if not isinstance(event, DocumentStartEvent):
                root = self.node(event, "")
            elif root is not None:
                self.problem(event, "", "a second YAML document starts here; a configuration is a single document")
        return root

    def node(self, event: Event, path: str) -> Node:
        origin = self.origin_of(event.start_mark.line)
        if isinstance(event, AliasEvent):
            known = self.anchors.get(event.anchor)
            if known is None:
                self.problem(event, path, f"*{event.anchor} is undefined: there is no &{event.anchor} before it")
                return Node(None, origin)
            # A copy, because an override of one occurrence must not change the other.
            return replace(copy.deepcopy(known), origin=replace(origin, variables=known.origin.variables))
        if isinstance(event, ScalarEvent):
            node = self.scalar(event, path, origin)
        elif isinstance(event, SequenceStartEvent):
            node = Node(self.items(path), origin)
        else:
            node = Node(self.entries(path), origin)
        if isinstance(event, NodeEvent) and event.anchor:
            self.anchors[event.anchor] = node
        return node

    def scalar(self, event: ScalarEvent, path: str, origin: Origin) -> Node:
        used: list[str] = []
        text = substitute(event.value, used, lambda message: self.problem(event, path, message))
        if used:
            origin = Origin(origin.kind, origin.where, origin.text, origin.line, tuple(used))
        if event.tag not in (None, "!", STRING_TAG):
            self.problem(event, path, f"the tag {event.tag} is not supported; remove it")
        is_plain = event.style is None and event.tag is None
        return Node(resolve_scalar(text) if is_plain else text, origin, event.value if used else None)

    def items(self, path: str) -> list[Node]:
        items: list[Node] = []
        for event in self.events:
            if isinstance(event, SequenceEndEvent):
                break
            items.append(self.node(event, f"{path}.{len(items)}"))
        return items

    def entries(self, path: str) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for event in self.events:
            if isinstance(event, MappingEndEvent):
                break
            name = self.key(event, path)
            child = f"{path}.{name}" if path else name
            node = self.node(next(self.events), child)
            here = self.origin_of(event.start_mark.line)
            node = replace(node, origin=replace(here, variables=node.origin.variables))
            if name in entries:
                first = entries[name].origin
                self.problem(event, child, f"set twice, first at {first.where}; remove one of the two", also=(first,))
            else:
                entries[name] = node
        return entries

    def key(self, event: Event, path: str) -> str:
        if isinstance(event, ScalarEvent):
            if event.value == "<<" and event.style is None:
                self.problem(event, path, "merge keys (<<) are not supported; list the options explicitly")
            return event.value
        self.node(event, path)
        self.problem(event, path, "an option's name must be a plain word, not a list, mapping or alias")
        return f"line {event.start_mark.line + 1}"

    def problem(self, event: Event, path: str, message: str, also: tuple[Origin, ...] = ()) -> None:
        self.problems.append(Problem(self.origin_of(event.start_mark.line), path, message, also))
