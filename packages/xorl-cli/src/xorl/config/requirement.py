"""The rows of the tables of requirements: options that only matter beside another option."""

from collections.abc import Callable
from dataclasses import dataclass

from xorl.config.entries import DatasetEntryConfig
from xorl.config.local import Config


@dataclass(frozen=True)
class _Row:
    """Options that have no effect unless the option `switch` has a value that `wanted` describes."""

    options: tuple[str, ...]
    switch: str
    wanted: str

    @property
    def condition(self) -> str:
        """The condition under which the options have an effect, as the end of a sentence."""
        return f"unless {self.switch} is {self.wanted}"


@dataclass(frozen=True)
class Requirement(_Row):
    """A requirement of options outside dataset entries.

    `is_error` marks options that cannot be ignored, because the run would not be what they ask for.
    """

    is_met: Callable[[Config], bool]
    is_error: bool = False


@dataclass(frozen=True)
class EntryRequirement(_Row):
    """A requirement of options of a dataset entry."""

    is_met: Callable[[Config, DatasetEntryConfig], bool]
