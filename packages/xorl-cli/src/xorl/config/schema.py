"""Schema: the differences between the two kinds of configuration, local training and service."""

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
    """A kind of configuration.

    Attributes:
        sections: empty if the options have no sections.
        conflicts: finds conflicts between values that are valid by themselves.
        find_unsupported: yields (path, message) for values that are not supported.
        resolve: fills in defaults that depend on other options, and returns the reasons for them.
        placeholders: values for missing required options, so that the rest can still be checked.
        prefix: precedes option names on the command line.
        unknown_option_hint: explains where an unknown option belongs, if that is known.
    """

    root: type[ConfigT]
    sections: tuple[str, ...]
    conflicts: Callable[[ConfigT], Iterable[Conflict]]
    find_unsupported: Callable[[ConfigT], Iterable[tuple[str, str]]]
    resolve: Callable[[ConfigT], tuple[ConfigT, dict[str, str]]]
    placeholders: Mapping[str, Plain] = field(default_factory=dict)
    prefix: str = ""
    unknown_option_hint: Callable[[str], str | None] = lambda name: None

    def suggestion(self, path: str) -> tuple[str, str | None]:
        """Returns the message for an unknown option, and the path of the option that was probably meant."""
        hint = self.unknown_option_hint(path)
        return (hint, None) if hint else suggestion(path, self.root)
