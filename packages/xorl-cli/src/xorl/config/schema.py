"""Schema: the differences between the two kinds of configuration, local run and service."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from xorl.config.document import Plain
from xorl.config.fields import Section
from xorl.config.options import suggestion
from xorl.config.problems import Conflict

ConfigT = TypeVar("ConfigT", bound=Section)

PLACEHOLDER = "-"


@dataclass(frozen=True)
class Schema(Generic[ConfigT]):
    """One kind of configuration.

    `sections` is empty if options are flat. `conflicts` and `refused` check values that are valid alone; `refused`
    yields (path, message). `resolve` fills in defaults that depend on other options, with the reasons. `placeholders`
    replace missing required options, so that the rest can be checked. On the command line options begin with `prefix`.
    `elsewhere` returns where an unknown name belongs, if that is known.
    """

    root: type[ConfigT]
    sections: tuple[str, ...]
    conflicts: Callable[[ConfigT], Iterable[Conflict]]
    refused: Callable[[ConfigT], Iterable[tuple[str, str]]]
    resolve: Callable[[ConfigT], tuple[ConfigT, dict[str, str]]]
    placeholders: Mapping[str, Plain] = field(default_factory=dict)
    prefix: str = ""
    elsewhere: Callable[[str], str | None] = lambda name: None

    def suggestion(self, path: str) -> tuple[str, str | None]:
        """Returns the message for an unknown option, and the path of the option that was probably meant."""
        told = self.elsewhere(path)
        return (told, None) if told else suggestion(path, self.root)
