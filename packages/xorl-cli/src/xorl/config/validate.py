"""Validates a tree of values and returns a configuration, or a list of all problems.

Values that are invalid by themselves are removed before options are compared with each other. Both kinds of problem are
therefore reported together, and none is a consequence of another.
"""

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from pydantic import ValidationError

from xorl.config.document import Node, Plain, resolve_scalar
from xorl.config.fields import Section
from xorl.config.options import (
    ENDPOINT_LIST,
    ENTRY_LISTS,
    MEMBER_LIST,
    Option,
    documented_path,
    entry_type,
    find_option,
    is_entry,
    suggest_choice,
    suggestion,
    yaml_text,
)
from xorl.config.problems import Conflict, Origin, Problem, hide_secrets
from xorl.config.requirements import WithoutEffect

# Booleans in YAML 1.1 that are strings in YAML 1.2.
OLD_BOOLEANS = {"yes": "true", "on": "true", "no": "false", "off": "false"}
KINDS = {str: " (a string)", list: " (a list)", dict: " (a mapping)"}
SECTION_DEPTH = 2  # path components of an option in a section
MAX_SHOWN = 60  # characters of a value shown in a message
PLACEHOLDER = "-"
# Characters that occur in regular expressions and not in the names of layers.
_EXPRESSION = re.compile(r"[][*+?^$(){}|\\]")

Path = tuple[str | int, ...]
ConfigT = TypeVar("ConfigT", bound=Section)


@dataclass(frozen=True)
class Schema(Generic[ConfigT]):
    """A kind of configuration: local training or the service.

    Attributes:
        sections: empty if the options have no sections.
        without_effect: resets options that have no effect to their defaults, and lists them.
        conflicts: finds conflicts between values that are valid by themselves and have an effect.
        find_unsupported: yields (path, message) for values that are not supported.
        resolve: fills in defaults that depend on other options, and returns the reasons for them.
        placeholders: values for missing required options, so that the rest can still be checked.
        prefix: precedes option names on the command line.
        unknown_option_hint: explains where an unknown option belongs, if that is known.
    """

    root: type[ConfigT]
    sections: tuple[str, ...]
    without_effect: Callable[[ConfigT], tuple[ConfigT, list[WithoutEffect]]]
    conflicts: Callable[[ConfigT], Iterable[Conflict]]
    find_unsupported: Callable[[ConfigT], Iterable[tuple[str, str]]]
    resolve: Callable[[ConfigT], tuple[ConfigT, dict[str, str]]]
    placeholders: Mapping[str, Plain] = field(default_factory=dict)
    prefix: str = ""
    unknown_option_hint: Callable[[str], str | None] = lambda name: None


@dataclass(frozen=True)
class Validated(Generic[ConfigT]):
    """A configuration whose options without effect are reset, or None and all problems."""

    config: ConfigT | None
    problems: list[Problem]
    without_effect: list[WithoutEffect] = field(default_factory=list)


def validate(root: Node, schema: Schema[ConfigT]) -> Validated[ConfigT]:
    """Checks a tree of values."""
    data = root.plain()
    if data is None:
        data = {}
    if not isinstance(data, dict):
        expected = f"with the sections {', '.join(schema.sections)}" if schema.sections else "of options"
        problem = Problem(root.origin, "", f"expected a mapping {expected}, got a list or a single value")
        return Validated(None, [problem])
    for name in schema.sections:
        # If all options of a section are commented out, YAML parses the section as null.
        if data.get(name) is None:
            data[name] = {}
    try:
        config = schema.root.model_validate(data)
        problems, failing = [], set()
    except ValidationError as error:
        problems, failing = _problems_of(error, data, root, schema)
        config = schema.root.model_validate(_without(data, failing, schema))
    failing_options = {_dotted(path) for path in failing}
    effective, without_effect = schema.without_effect(config)
    for conflict in schema.conflicts(effective):
        if not any(_is_affected(path, failing_options) for path in conflict.paths):
            message = _with_variables(conflict.message, root)
            problems.append(_conflict_problem(conflict.paths, message, effective, root))
    for path, message in schema.find_unsupported(config):
        if not _is_affected(path, failing_options):
            problems.append(Problem(root.nearest(_parts(path)).origin, path, _with_variables(message, root)))
    return Validated(None if problems else effective, problems, without_effect)


def _problems_of(
    error: ValidationError, data: Plain, root: Node, schema: Schema[ConfigT]
) -> tuple[list[Problem], set[Path]]:
    """Translates Pydantic's errors, one per option; also returns the paths that failed."""
    kinds: dict[Path, str] = {}
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        path = _existing_path(detail["loc"], data, detail["type"])
        kinds.setdefault(path, detail["type"])
    problems: list[Problem] = []
    meant: set[str] = set()
    for path, kind in kinds.items():
        if kind == "extra_forbidden":
            hint = schema.unknown_option_hint(_dotted(path))
            message, option = (hint, None) if hint else suggestion(_dotted(path), schema.root)
            meant |= {_intended_path(path, option)} if option else set()
            origin = root.nearest(path).origin
            found = find_option(option, schema.root) if option else None
            if found and found.is_secret:
                origin = replace(origin, text=hide_secrets(origin.text, [str(path[-1])]))
            problems.append(Problem(origin, _dotted(path), message))
        elif kind != "missing":
            message = _type_message(path, data, root.plain(expanded=False), schema.root)
            problems.append(Problem(root.nearest(path).origin, _dotted(path), message))
    for path, kind in kinds.items():
        # A misspelt required option is not also reported as missing.
        if kind == "missing" and _dotted(path) not in meant:
            option = find_option(_dotted(path), schema.root)
            described = f": {option.description}" if option else ""
            origin = root.nearest(path).origin
            # Do not blame an override for the missing options of a section that only overrides mention.
            is_from_override = origin.kind == "override" and path[0] in schema.sections and len(path) == SECTION_DEPTH
            origin = root.origin if is_from_override else origin
            problems.append(Problem(origin, _dotted(path), f"required option is missing{described}"))
    return problems, set(kinds) | {_parts(option) for option in meant}


def _intended_path(path: Path, option: str) -> str:
    """Returns the path of the option meant by an unknown one: next to it if that is the right section."""
    section, _, name = option.rpartition(".")
    return _dotted((*path[:-1], name)) if documented_path(_dotted(path[:-1])) == section else option


def _existing_path(location: Sequence[str | int], data: Plain, kind: str) -> Path:
    """Returns the part of a Pydantic location that exists in the data; the rest names members of unions.

    A missing option does not exist in the data, but its name is kept.
    """
    path: list[str | int] = []
    value: Plain = data
    for part in location:
        if isinstance(value, dict) and part in value:
            value = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            if kind == "missing":
                path.append(part)
            break
        path.append(part)
    return tuple(path)


def _type_message(path: Path, data: Plain, written: Plain, root: type[Section]) -> str:
    value = _value_at(path, data)
    option = find_option(_dotted(path), root)
    if option is not None and option.is_secret:
        return f"expected {option.type} in the form described below; the secret is not shown\n{option.description}"
    got = _display_value(value, _value_at(path, written))
    is_expanded = _value_at(path, written) != value
    if option is None and is_entry(_dotted(path)):
        return _entry_message(path, value, got, root, is_expanded=is_expanded)
    if option is None:
        # This is an element of a list or mapping, which is the option.
        prefixes = (_dotted(path[:end]) for end in range(len(path), 0, -1))
        owner = next((found for prefix in prefixes if (found := find_option(prefix, root))), None)
        expected = owner.type if owner else f"mapping of options (see `xorl config docs {_dotted(path)}`)"
        hint = _element_hint(owner, value) if owner and not is_expanded else ""
        return f"expected {expected}, got {got}{hint}"
    if isinstance(value, str) and value and option.type.startswith("string"):
        return f"expected {option.type} in the form described below, got {got}\n{option.description}"
    # A hint would reveal the value of an environment variable.
    hint = "" if is_expanded and value != "" else _hint(option, value)
    return f"expected {option.type}, got {got}{hint}"


def _entry_message(path: Path, value: Plain, got: str, root: type[Section], *, is_expanded: bool) -> str:
    """The message for an invalid entry of a list such as data.datasets."""
    entry = entry_type(_dotted(path), root)
    fields = entry.model_fields
    key = next(name for name, field in fields.items() if field.is_required())
    kind = (entry.__doc__ or "").lower()
    article = "an" if kind[0] in "aeiou" else "a"
    hint = f"\nwrite - {key}: {yaml_text(value)}" if isinstance(value, str) and not is_expanded else ""
    return f"expected {article} {kind}, a mapping with {', '.join(fields)}; got {got}{hint}"


def _display_value(value: Plain, written: Plain) -> str:
    """A value as written, followed by its kind."""
    text = f'"{written}"' if isinstance(written, str) else yaml_text(written).replace("$${", "${")
    if len(text) > MAX_SHOWN:
        text = f"{text[:MAX_SHOWN]}..."
    kind = next((word for type_, word in KINDS.items() if isinstance(value, type_)), "")
    return f"{text}{kind}"


def _with_variables(message: str, root: Node) -> str:
    """Replaces the values of variables with `${NAME}` in a message about several options."""
    found = {node.value: node.written for node in root.expanded() if isinstance(node.value, str) and node.written}
    for value in sorted(filter(None, found), key=len, reverse=True):
        message = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", lambda _, text=found[value]: text, message)
    return message


def _hint(option: Option, value: Plain) -> str:
    """Returns the probable fix, starting with a newline, or an empty string."""
    words = option.type
    if value in ("", []):
        return "\nthe value is empty" if "not empty" in words else ""
    if isinstance(value, str):
        near = suggest_choice(option, value)
        if near:
            return f"\ndid you mean {near}?"
        if "true or false" in words and value.lower() in OLD_BOOLEANS:
            return f"\n{value} is a string in YAML 1.2; write {OLD_BOOLEANS[value.lower()]}"
        number = resolve_scalar(value.replace("_", ""))
        is_wanted_boolean = isinstance(number, bool) and "true or false" in words
        if is_wanted_boolean or (type(number) in (int, float) and re.search("integer|number", words)):
            return f"\nwrite {yaml_text(number)}, without {'quotes' if '_' not in value else 'underscores'}"
        if "list of strings" in words:
            if "all-linear" in words and _EXPRESSION.search(value):
                return "\nlist names of layers, such as [q_proj, v_proj]; regular expressions are not supported"
            return f"\nwrite [{', '.join(yaml_text(part.strip()) for part in value.split(','))}]"
    elif isinstance(value, float) and math.isfinite(value) and value.is_integer():
        least = re.search(r"integer >= (-?\d+)", words)
        return f"\nwrite {int(value)}" if least and value >= int(least[1]) else ""
    elif isinstance(value, bool | int | float) and words.startswith("string"):
        return f'\nadd quotes: "{yaml_text(value)}"'
    elif isinstance(value, str | int | float) and words.startswith("list"):
        return f"\nwrite [{yaml_text(value)}]"
    return ""


def _element_hint(owner: Option, value: Plain) -> str:
    """Returns the probable fix for an element of the list or mapping `owner`."""
    if isinstance(value, str):
        near = suggest_choice(owner, value)
        return f"\ndid you mean {near}?" if near else ""
    if "of strings" in owner.type and isinstance(value, bool | int | float):
        return f'\nadd quotes: "{yaml_text(value)}"'
    return ""


def _conflict_problem(paths: Sequence[str], message: str, config: Section, root: Node) -> Problem:
    """Cites the first option of a conflict that was set, and the positions of the others."""
    origins: dict[str, Origin] = {}
    for path in paths:
        node = root.nearest(_parts(path))
        if _is_set(config, path):
            origins[path] = node.origin
    cited = next(iter(origins), paths[0])
    origin = origins.pop(cited, root.nearest(_parts(cited)).origin)
    return Problem(origin, cited, message, tuple(origins.values()))


def _is_set(config: Section, path: str) -> bool:
    """Whether an option was set explicitly."""
    *parents, name = _parts(path)
    owner: object = config
    for part in parents:
        owner = owner[part] if isinstance(owner, list) and isinstance(part, int) else getattr(owner, str(part))
    return isinstance(owner, Section) and name in owner.model_fields_set


def _is_affected(path: str, failing: Iterable[str]) -> bool:
    """Whether an option, its parent or one of its elements is invalid."""
    return any(path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.") for other in failing)


def _without(data: Plain, failing: set[Path], schema: Schema[ConfigT]) -> Plain:
    """Returns a copy without the invalid values, and with placeholders for missing required options."""
    kept = copy.deepcopy(data)
    assert isinstance(kept, dict)
    for path in sorted(failing, key=len, reverse=True):
        parent = _value_at(path[:-1], kept)
        if isinstance(parent, dict):
            parent.pop(str(path[-1]), None)
        elif isinstance(parent, list) and is_entry(_dotted(path)):
            parent[int(path[-1])] = {}
        elif isinstance(parent, list):
            owner = _value_at(path[:-2], kept)
            if isinstance(owner, dict):
                owner.pop(str(path[-2]), None)
    for name in schema.sections:
        kept.setdefault(name, {})
    for required, placeholder in schema.placeholders.items():
        parent = _value_at(_parts(required)[:-1], kept)
        assert isinstance(parent, dict), "invalid values were removed and all sections exist"
        parent.setdefault(required.rpartition(".")[2], copy.deepcopy(placeholder))
    _fill_required_in_entries_(kept)
    return kept


def _fill_required_in_entries_(data: Plain) -> None:
    """Fills in placeholders for missing required options of list entries."""
    members = _value_at(_parts(MEMBER_LIST), data)
    num_members = len(members) if isinstance(members, list) else 0
    required = {MEMBER_LIST: "name"} | dict.fromkeys(
        (*ENTRY_LISTS, *(f"{MEMBER_LIST}.{index}.datasets" for index in range(num_members))), "path"
    )
    endpoints = _value_at((ENDPOINT_LIST,), data)
    for entry in endpoints if isinstance(endpoints, list) else []:
        if isinstance(entry, dict):
            entry.setdefault("host", PLACEHOLDER)
            entry.setdefault("port", 1)
    for path, key in required.items():
        entries = _value_at(_parts(path), data)
        for index, entry in enumerate(entries if isinstance(entries, list) else []):
            if isinstance(entry, dict):
                # Names are checked for duplicates, so the placeholders must be distinct.
                entry.setdefault(key, f"placeholder{index}" if key == "name" else PLACEHOLDER)


def _value_at(path: Path, data: Plain) -> Plain:
    value = data
    for part in path:
        if isinstance(value, dict):
            value = value.get(str(part))
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _parts(path: str) -> Path:
    return tuple(int(part) if part.isdecimal() else part for part in path.split("."))
