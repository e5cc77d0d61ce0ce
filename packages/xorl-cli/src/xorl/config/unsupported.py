"""A table of the option values that are not supported.

An option is never accepted and ignored. The schema already contains every value, so that users read why a value is not
supported and what to use instead, rather than a type error. Once a feature is implemented, delete its row here.
"""

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from xorl.config.local import Config
from xorl.config.options import ENTRIES, Option, all_options, entries_of, yaml_text


@dataclass(frozen=True)
class UnsupportedValues:
    """Unsupported values of an option.

    `option` is a path, `data.datasets[].x` for every dataset entry, or a pattern with `*`. `values` lists the
    unsupported ones; empty means all but the default. For open sets of values, `matches` decides instead of `values`,
    and `shown` describes them.
    """

    option: str
    reason: str
    instead: str
    values: tuple[object, ...] = ()
    matches: Callable[[object], bool] | None = None
    shown: str = ""

    def rejects(self, value: object, default: object) -> bool:
        """Whether a value is unsupported, for an option with this default."""
        if self.matches is not None:
            return self.matches(value)
        return value in self.values if self.values else value != default

    def message(self, value: object) -> str:
        """The error message."""
        return f"{yaml_text(value)} is not supported: {self.reason}\n{self.instead}"

    def summary(self) -> str:
        """The sentence in the option's documentation."""
        values = self.shown or ", ".join(map(yaml_text, self.values)) or "anything but the default"
        return f"Not supported: {values} ({self.reason})"


UNSUPPORTED: tuple[UnsupportedValues, ...] = (
    UnsupportedValues(
        "model.encoders",
        "encoders of video and audio are not supported yet",
        "leave them out; images are supported",
        matches=lambda value: isinstance(value, dict) and bool(value.keys() - {"image"}),
        shown="video and audio",
    ),
    UnsupportedValues(
        f"{ENTRIES}.trust_remote_code",
        "the datasets library no longer runs loading scripts",
        "use a dataset of plain files (parquet, json, csv) and leave it at false",
    ),
    UnsupportedValues(
        "train.init_device",
        "xorl only runs on CUDA GPUs and on CPUs",
        "use auto",
        values=("npu",),
    ),
)


@cache
def unsupported_values(option: str) -> tuple[UnsupportedValues, ...]:
    """Returns the rows of the table for an option, by its documented path."""
    return tuple(row for row in UNSUPPORTED if row.option == option or fnmatch.fnmatchcase(option, row.option))


def find_unsupported(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (path, message) for every unsupported value in a configuration."""
    for option in all_options().values():
        for row in unsupported_values(option.path):
            for path, value, default in _values(config, option):
                if row.rejects(value, default):
                    yield path, row.message(value)


def _values(config: Config, option: Option) -> Iterator[tuple[str, object, object]]:
    """Yields (path, value, default) of an option: once, or for each entry of a list."""
    for path, section in entries_of(config, option.section):
        default = type(section).model_fields[option.name].default
        yield f"{path}.{option.name}", getattr(section, option.name), default
