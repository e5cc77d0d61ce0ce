"""Options given on the command line: `--section.field value` and `--section.field=value`.

Values are YAML and follow the same rules as in the file. A later override of the same option wins.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from xorl.config.document import Node, read_value
from xorl.config.problems import Origin, Problem, hide_secrets

# Arguments, or options and their values.
Overrides: TypeAlias = Sequence[str] | Mapping[str, object]


@dataclass(frozen=True)
class Override:
    """An override. `name` includes the prefix, `path` does not; `text` is None if the value is missing.

    `shown` is the override as messages quote it, with secret values masked.
    """

    name: str
    path: str
    text: str | None
    shown: str

    @property
    def origin(self) -> Origin:
        """The position that a report cites."""
        return Origin("override", f"--{self.name}", self.shown)


def arguments_of(overrides: Mapping[str, object], prefix: str = "") -> tuple[str, ...]:
    """The arguments that set options, by their paths, to values of Python."""
    return tuple(f"--{prefix}{path}={json.dumps(value, default=str)}" for path, value in overrides.items())


def is_override(argument: str) -> bool:
    """Whether a command-line argument starts an override: two dashes followed by a name with a dot."""
    return argument.startswith("--") and "." in argument.split("=", 1)[0]


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments into those of overrides and the rest, each in order.

    The argument after an override is its value unless it starts with two dashes.
    """
    overrides: list[str] = []
    rest: list[str] = []
    takes_value = False
    for argument in arguments:
        if is_override(argument):
            overrides.append(argument)
            takes_value = "=" not in argument
        elif takes_value and not argument.startswith("--"):
            overrides.append(argument)
            takes_value = False
        else:
            rest.append(argument)
            takes_value = False
    return overrides, rest


def parse_overrides(
    arguments: Sequence[str], prefix: str = "", secrets: Collection[str] = ()
) -> tuple[list[Override], list[Problem]]:
    """Parses arguments that are all overrides; returns the overrides and the problems.

    Each name starts with `prefix`, which is not part of the option's path. Values of options in `secrets` are masked.
    """
    overrides: list[Override] = []
    problems: list[Problem] = []
    pending: str | None = None  # an option that still needs its value

    def add(name: str, text: str | None) -> None:
        if not name.startswith(prefix):
            message = f"the options of the service have no sections; write --{prefix}{name.rpartition('.')[2]} VALUE"
            problems.append(Problem(Origin("override", f"--{name}"), "", message))
        else:
            shown = hide_secrets(f"--{name} {text or ''}".rstrip(), secrets)
            overrides.append(Override(name, name.removeprefix(prefix), text, shown))

    for argument in arguments:
        if pending is not None and not argument.startswith("--"):
            add(pending, argument)
            pending = None
            continue
        if pending is not None:
            add(pending, None)
            pending = None
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not name:
            message = "expected an override: --section.field value or --section.field=value"
            problems.append(Problem(Origin("override", argument), "", message))
        elif equals:
            add(name, value)
        else:
            pending = name
    if pending is not None:
        add(pending, None)
    return overrides, problems


def apply_overrides_(root: Node, overrides: Sequence[Override]) -> list[Problem]:
    """Applies overrides to a tree, in order, and returns the problems."""
    problems: list[Problem] = []
    for override in overrides:
        origin = override.origin
        if override.text is None:
            message = f"the value is missing; write --{override.name} VALUE (true or false for a switch)"
            problems.append(Problem(origin, override.path, message))
            continue
        document = read_value(override.text, origin)
        problems += [Problem(origin, override.path, problem.message) for problem in document.problems]
        if document.problems:
            continue
        # Empty text is null in YAML.
        value = document.root or Node(None, origin)
        error = _set_(root, override.path.split("."), value)
        if error:
            problems.append(Problem(origin, override.path, error))
    return problems


def _set_(node: Node, path: Sequence[str], value: Node) -> str | None:
    """Sets the value at a path, creating mappings and list entries as needed. Returns an error message on failure."""
    for position, part in enumerate(path):
        is_last = position == len(path) - 1
        if node.value is None:
            node.value = [] if part.isdecimal() else {}
        if isinstance(node.value, dict):
            child = value if is_last else node.value.get(part) or Node(None, value.origin)
            node.value[part] = child
        elif isinstance(node.value, list):
            here = ".".join(path[:position])
            if not part.isdecimal() or int(part) > len(node.value):
                end = len(node.value)
                return f"{part!r} is not a valid index of {here}; use 0 to {end}, where {end} appends an entry"
            child = value if is_last else Node(None, value.origin)
            if int(part) == len(node.value):
                node.value.append(child)
            elif is_last:
                node.value[int(part)] = value
            else:
                child = node.value[int(part)]
        else:
            return f"{'.'.join(path[:position])} is a single value, so {part!r} cannot be set in it"
        node = child
    return None
