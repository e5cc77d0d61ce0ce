"""Problems in a configuration with their positions, and the error that reports all of them."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

OriginKind = Literal["file", "override", "default", "environment", "python"]


@dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    `where` is `config.yaml:12` or `--train.lr`; `text` is the line, or the override as typed; `line` is 0 outside
    files; `variables` are the environment variables in the value.
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
        """Returns the numbered line, or the override, for a report; empty if there is neither."""
        if not self.text.strip():
            return ""
        return f"{self.line:>6} | {self.text.rstrip()}" if self.line else f"       | {self.text}"


@dataclass(frozen=True)
class Problem:
    """A problem with the option at `path`; `also` are other lines involved."""

    origin: Origin
    path: str
    message: str
    also: tuple[Origin, ...] = ()

    def __str__(self) -> str:
        where = self.origin.where
        # An override may be written with a prefix that is not part of the path.
        is_named = where.startswith("--") and f".{where[2:]}".endswith(f".{self.path}")
        head = where if not self.path or is_named else f"{where}: {self.path}"
        lines = [self.origin.shown(), *(origin.shown() for origin in self.also)]
        body = [f"       {line}" for line in self.message.splitlines()]
        return "\n".join([head, *(line for line in dict.fromkeys(lines) if line), *body])


def hide_secrets(text: str, names: Collection[str]) -> str:
    """Masks the text after the name of a secret option in a line as typed, unless that text is a `${NAME}`."""
    if not names:
        return text
    name = rf"""\b(?:{"|".join(map(re.escape, names))})["']?"""
    variable = r"""["']?\$\{\w+\}["']?(?:[\s,}]|$)"""
    return re.sub(rf"({name}(?:\s*[:=]\s*|\s+))(?!{variable})\S.*", r"\1***", text)


class ConfigError(ValueError):
    """An invalid configuration. `problems` lists every problem; str() returns the full report."""

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
    """A conflict between options; it is reported at the first of `paths` that was set."""

    paths: tuple[str, ...]
    message: str
