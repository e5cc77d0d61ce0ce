"""Loads a configuration from a file and overrides and validates it. All configurations are created here."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Generic

from xorl.config.arguments import naming_options
from xorl.config.conflicts import conflicts_in
from xorl.config.document import Node, ParsedDocument, node_of, read_document
from xorl.config.local import Config
from xorl.config.options import all_options, entries_of
from xorl.config.overrides import Overrides, apply_overrides_, arguments_of, parse_overrides
from xorl.config.problems import ConfigError, Origin, Problem
from xorl.config.requirements import WithoutEffect, local_default, without_effect
from xorl.config.resolve import resolve
from xorl.config.server import ServerConfig
from xorl.config.server_conflicts import (
    find_server_unsupported,
    server_conflicts,
    server_without_effect,
    unknown_option_hint,
)
from xorl.config.server_training import resolve_server
from xorl.config.unsupported import find_unsupported
from xorl.config.validate import PLACEHOLDER, ConfigT, Schema, validate

NO_LINE = 0  # the line number of overrides
# The secret options of both commands, since users may pass a file to the wrong one.
SECRETS = [option.name for root in (Config, ServerConfig) for option in all_options(root).values() if option.is_secret]

LOCAL = Schema(
    Config,
    tuple(Config.model_fields),
    without_effect=partial(without_effect, default_of=local_default),
    conflicts=conflicts_in,
    find_unsupported=find_unsupported,
    resolve=resolve,
    placeholders={"train.output_dir": PLACEHOLDER, "data.datasets": [{"path": PLACEHOLDER}]},
)
SERVER = Schema(
    ServerConfig,
    (),
    without_effect=server_without_effect,
    conflicts=server_conflicts,
    find_unsupported=find_server_unsupported,
    resolve=resolve_server,
    prefix="server.",
    unknown_option_hint=unknown_option_hint,
)


@dataclass(frozen=True)
class ConfigWithOrigins(Generic[ConfigT]):
    """A valid configuration, and where each of its values comes from.

    `origins` maps each option to the origin of its value: `config.yaml:12`, `--train.lr`, `environment NAME` or
    `default`. `path` is None for a configuration created in Python; `overrides` are the arguments as given.
    `without_effect` lists the options that were set but have no effect; `config` has their defaults.
    """

    config: ConfigT
    origins: dict[str, str]
    path: Path | None
    overrides: tuple[str, ...] = ()
    without_effect: tuple[WithoutEffect, ...] = ()

    def without_effect_line(self) -> str | None:
        """The options without effect, and when they would have one, in one line; None if there are none."""
        groups = groupby(self.without_effect, key=lambda option: option.condition)
        listed = [f"{', '.join(option.path for option in options)} ({condition})" for condition, options in groups]
        return f"options without effect: {'; '.join(listed)}" if listed else None

    def is_set(self, option: str) -> bool:
        """Whether an option was given explicitly."""
        return not self.origins[option].startswith(("default", "environment"))

    def write_origins(self, file: Path) -> None:
        """Write the origins for a process that reads this configuration from another file."""
        file.write_text(json.dumps({"path": str(self.path), "origins": self.origins}), encoding="utf-8")

    def with_origins(self, file: Path) -> "ConfigWithOrigins[ConfigT]":
        """The same configuration with the origins that `write_origins` wrote."""
        written = json.loads(file.read_text(encoding="utf-8"))
        return replace(self, path=Path(written["path"]), origins=written["origins"])

    @contextmanager
    def citing(self) -> Iterator[None]:
        """Within this context, errors of the libraries name options, and a ValueError that begins with an option, or
        with a part of its value, cites its line.
        """
        try:
            with naming_options():
                yield
        except ValueError as error:
            origin = self._origin(re.split(r"[^\w.\[\]]", str(error), maxsplit=1)[0])
            if self.path is None or not origin.startswith(f"{self.path}:"):
                raise
            raise ValueError(f"{origin}: {error}") from error

    def _origin(self, written: str) -> str:
        """The origin of an option, of the option around `written`, or of the first one in an entry of a list."""
        option = re.sub(r"\[(\d+)\]", r".\1", written)
        if written.endswith("]"):
            return next((origin for path, origin in self.origins.items() if path.startswith(f"{option}.")), "")
        while option and option not in self.origins:  # part of an option's value
            option = option.rpartition(".")[0]
        return self.origins.get(option, "")


LoadedConfig = ConfigWithOrigins[Config]
LoadedServerConfig = ConfigWithOrigins[ServerConfig]


def load_config(path: Path | str, overrides: Overrides = ()) -> LoadedConfig:
    """Reads the YAML file of a local run, applies overrides and validates the result.

    `overrides` are arguments, `--section.field` and its value, or a mapping of options to values.

    Raises ConfigError, which lists every problem with its location.
    """
    return _load(path, overrides, LOCAL)


def load_server_config(path: Path | str, overrides: Overrides = ()) -> LoadedServerConfig:
    """Like `load_config`, for the YAML file of a service and `--server.field value` overrides."""
    return _load(path, overrides, SERVER)


def config_from_mapping(data: Mapping[str, object], overrides: Overrides = ()) -> LoadedConfig:
    """Validates a configuration created in Python by the same rules. Raises ConfigError."""
    return _finish(ParsedDocument(node_of(data, Origin("python", "python"))), None, overrides, LOCAL)


def server_config_from_mapping(data: Mapping[str, object], overrides: Overrides = ()) -> LoadedServerConfig:
    """Validates a service's configuration created in Python by the same rules. Raises ConfigError."""
    return _finish(ParsedDocument(node_of(data, Origin("python", "python"))), None, overrides, SERVER)


def _load(path: Path | str, overrides: Overrides, schema: Schema[ConfigT]) -> ConfigWithOrigins[ConfigT]:
    path, name = Path(path), str(path)
    document = read_document(_text_of(path), name, SECRETS)
    root = document.root or Node(None, Origin("file", f"{name}:1", "", 1))
    is_unreadable = document.root is None and bool(document.problems)
    parsed = ParsedDocument(None if is_unreadable else root, document.problems)
    return _finish(parsed, path, overrides, schema)


def _finish(
    document: ParsedDocument, path: Path | None, overrides: Overrides, schema: Schema[ConfigT]
) -> ConfigWithOrigins[ConfigT]:
    name = "the configuration" if path is None else str(path)
    if isinstance(overrides, Mapping):
        overrides = arguments_of(overrides, schema.prefix)
    parsed, problems = parse_overrides(overrides, schema.prefix, SECRETS)
    problems = [*document.problems, *problems]
    if document.root is None:
        raise ConfigError(problems, name)
    problems += apply_overrides_(document.root, parsed)
    validated = validate(document.root, schema)
    # Values that could not be parsed are placeholders; problems with them are not reported.
    unread = {(problem.path, problem.origin.line) for problem in problems}
    problems += [
        problem
        for problem in validated.problems
        if (problem.path, problem.origin.line) not in unread and (problem.path, NO_LINE) not in unread
    ]
    if problems or validated.config is None:
        raise ConfigError(problems, name)
    try:
        resolved, reasons = schema.resolve(validated.config)
    except ValueError as error:
        raise ConfigError([Problem(Origin("environment", "environment"), "", str(error))], name) from error
    for option in validated.without_effect:
        reasons.pop(option.path, None)  # the origin is that of the value without effect
    origins = _origins(resolved, document.root, reasons, schema.root)
    return ConfigWithOrigins(resolved, origins, path, tuple(overrides), tuple(validated.without_effect))


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        origin = Origin("file", f"{path}:{line}", "", line)
        raise ConfigError([Problem(origin, "", f"the file is not UTF-8 text: {error.reason}")], str(path)) from error
    except OSError as error:
        message = f"cannot read the file: {error.strerror or error}"
        if isinstance(error, FileNotFoundError) and path.parent.is_dir():
            others = [str(other) for other in path.parent.glob("*.y*ml")]
            near = difflib.get_close_matches(str(path), others, n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        raise ConfigError([Problem(Origin("file", str(path)), "", message)], str(path)) from error


def _origins(config: ConfigT, root: Node, reasons: Mapping[str, str], kind: type[ConfigT]) -> dict[str, str]:
    """Returns the origin of each option's value, by its path in this configuration."""
    origins: dict[str, str] = {}
    for option in all_options(kind).values():
        paths = [f"{section}.{option.name}".removeprefix(".") for section, _ in entries_of(config, option.section)]
        for path in paths:
            parts = [int(part) if part.isdecimal() else part for part in path.split(".")]
            node = root.find(parts)
            origins[path] = reasons.get(path) or (str(node.origin) if node else "default")
    return origins
