"""What can be wrong with a configuration, where it was written, and the report that shows all of it."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

OriginKind = Literal["file", "override", "default", "environment", "python"]


@dataclass(frozen=True)
class Origin:
    """Where a value was written.

    `where` is `config.yaml:12` or `--train.lr`; `text` is the line, or the override as it was typed; `line` is 0 for
    everything but files.
    """

    kind: OriginKind
    where: str
    text: str = ""
    line: int = 0
    variables: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.variables:
            return self.where
        return f"{self.where}, environment {', '.join(self.variables)}"

    def shown(self) -> str:
        """Returns the line with its number, or the override, as a report shows it; empty when there is nothing."""
        if not self.text.strip():
            return ""
        return f"{self.line:>6} | {self.text.rstrip()}" if self.line else f"       | {self.text}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where, with which option, and what is wanted; `also` are other lines involved."""

    origin: Origin
    path: str
    message: str
    also: tuple[Origin, ...] = ()

    def __str__(self) -> str:
        where = self.origin.where
        # An override may be written with a prefix that is no part of the path.
        is_named = where.startswith("--") and f".{where[2:]}".endswith(f".{self.path}")
        head = where if not self.path or is_named else f"{where}: {self.path}"
        lines = [self.origin.shown(), *(origin.shown() for origin in self.also)]
        body = [f"       {line}" for line in self.message.splitlines()]
        return "\n".join([head, *(line for line in dict.fromkeys(lines) if line), *body])


def hide_secrets(text: str, names: Collection[str]) -> str:
    """Masks what comes after a name of a secret option in a line as it was typed, unless that is a `${NAME}`."""
    if not names:
        return text
    name = rf"""\b(?:{"|".join(map(re.escape, names))})["']?"""
    variable = r"""["']?\$\{\w+\}["']?(?:[\s,}]|$)"""
    return re.sub(rf"({name}(?:\s*[:=]\s*|\s+))(?!{variable})\S.*", r"\1***", text)


class ConfigError(ValueError):
    """A configuration that cannot be used. `problems` holds everything that is wrong; str() is the whole report."""

    def __init__(self, problems: Sequence[Problem], source: str) -> None:
        files = [problem for problem in problems if problem.origin.line]
        others = [problem for problem in problems if not problem.origin.line]
        self.problems: tuple[Problem, ...] = (*sorted(files, key=lambda problem: problem.origin.line), *others)
        self.source = source
        super().__init__(source)

    def __str__(self) -> str:
        number = len(self.problems)
        head = f"{self.source}: {number} problem{'' if number == 1 else 's'}"
        return "\n\n".join([head, *map(str, self.problems)])


@dataclass(frozen=True)
class Conflict:
    """What is wrong and the options involved; the first one that was set is where it is reported."""

    paths: tuple[str, ...]
    message: str
