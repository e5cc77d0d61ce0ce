"""Options given on the command line: `--section.field value` and `--section.field=value`.

Values are YAML by the same rules as in the file. A later override of the same option wins.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from xorl.config.document import Node, read_value
from xorl.config.problems import Origin, Problem, hide_secrets


@dataclass(frozen=True)
class Override:
    """One override; `text` is None if it has no value. `name` is its full name with the prefix.

    `shown` is its text in messages, without a secret value.
    """

    name: str
    path: str
    text: str | None
    shown: str

    @property
    def origin(self) -> Origin:
        """The override as a report cites it."""
        return Origin("override", f"--{self.name}", self.shown)


def is_override(argument: str) -> bool:
    """Whether a command-line argument starts an override: two dashes and a name with a dot."""
    return argument.startswith("--") and "." in argument.split("=", 1)[0]


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments that belong to overrides, and the rest, each in order.

    An override takes the next argument as its value unless that starts with two dashes.
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
    """Returns the overrides among arguments that hold nothing else, and the problems.

    `prefix` begins each name and is not part of the option's path. The values of options in `secrets` are not cited.
    """
    overrides: list[Override] = []
    problems: list[Problem] = []
    waiting: str | None = None

    def add(name: str, text: str | None) -> None:
        if not name.startswith(prefix):
            message = f"options of the service are flat; write --{prefix}{name.rpartition('.')[2]} VALUE"
            problems.append(Problem(Origin("override", f"--{name}"), "", message))
        else:
            shown = hide_secrets(f"--{name} {text or ''}".rstrip(), secrets)
            overrides.append(Override(name, name.removeprefix(prefix), text, shown))

    for argument in arguments:
        if waiting is not None and not argument.startswith("--"):
            add(waiting, argument)
            waiting = None
            continue
        if waiting is not None:
            add(waiting, None)
            waiting = None
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not name:
            message = "an override is written --section.field value or --section.field=value"
            problems.append(Problem(Origin("override", argument), "", message))
        elif equals:
            add(name, value)
        else:
            waiting = name
    if waiting is not None:
        add(waiting, None)
    return overrides, problems


def apply_overrides_(root: Node, overrides: Sequence[Override]) -> list[Problem]:
    """Writes overrides into a tree, in order, and returns the problems."""
    problems: list[Problem] = []
    for override in overrides:
        origin = override.origin
        if override.text is None:
            message = f"has no value; write --{override.name} VALUE (true or false for a switch)"
            problems.append(Problem(origin, override.path, message))
            continue
        document = read_value(override.text, origin)
        problems += [Problem(origin, override.path, problem.message) for problem in document.problems]
        if document.problems:
            continue
        # An empty text is YAML's null.
        value = document.root or Node(None, origin)
        refusal = _set_(root, override.path.split("."), value)
        if refusal:
            problems.append(Problem(origin, override.path, refusal))
    return problems


def _set_(node: Node, path: Sequence[str], value: Node) -> str | None:
    """Sets the value at a path, creating mappings and list entries as needed; returns an error message if it cannot."""
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
                known = f"{here} has {len(node.value)} (0 is the first); the next free number is {len(node.value)}"
                return f"{part!r} is no entry of a list; {known}"
            child = value if is_last else Node(None, value.origin)
            if int(part) == len(node.value):
                node.value.append(child)
            elif is_last:
                node.value[int(part)] = value
            else:
                child = node.value[int(part)]
        else:
            return f"{'.'.join(path[:position])} is a single value and has no {part!r} below it"
        node = child
    return None
