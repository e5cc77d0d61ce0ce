"""Loads a configuration from a file and overrides, and checks it: the only entry point for configurations."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from xorl.config.conflicts import conflicts_in
from xorl.config.document import Document, Node, node_of, read_document
from xorl.config.local import Config
from xorl.config.options import all_options, entries_of
from xorl.config.overrides import apply_overrides_, parse_overrides
from xorl.config.problems import ConfigError, Origin, Problem
from xorl.config.refusals import refused_in
from xorl.config.resolve import resolve
from xorl.config.schema import PLACEHOLDER, ConfigT, Schema
from xorl.config.server import ServerConfig
from xorl.config.server_conflicts import elsewhere, server_conflicts
from xorl.config.server_refusals import server_refused
from xorl.config.server_training import resolve_server
from xorl.config.validate import validate

NO_LINE = 0  # of overrides
# Of both kinds of configuration: users also pass a file to the wrong command.
SECRETS = [option.name for root in (Config, ServerConfig) for option in all_options(root).values() if option.is_secret]

LOCAL = Schema(
    Config,
    tuple(Config.model_fields),
    conflicts=conflicts_in,
    refused=refused_in,
    resolve=resolve,
    placeholders={"train.output_dir": PLACEHOLDER, "data.datasets": [{"path": PLACEHOLDER}]},
)
SERVER = Schema(
    ServerConfig,
    (),
    conflicts=server_conflicts,
    refused=server_refused,
    resolve=resolve_server,
    prefix="server.",
    elsewhere=elsewhere,
)


@dataclass(frozen=True)
class Loaded(Generic[ConfigT]):
    """A checked configuration.

    `origins` maps every option to the origin of its value: `config.yaml:12`, `--train.lr`, `environment NAME` or
    `default`. `path` is None for a configuration made in Python; `overrides` are the arguments as given.
    """

    config: ConfigT
    origins: dict[str, str]
    path: Path | None
    overrides: tuple[str, ...] = ()

    def is_set(self, option: str) -> bool:
        """Whether an option was given explicitly."""
        return not self.origins[option].startswith(("default", "environment"))

    @contextmanager
    def citing(self) -> Iterator[None]:
        """A context that adds the position in the file to a ValueError that begins with an option."""
        try:
            yield
        except ValueError as error:
            origin = self._origin(re.split(r"[^\w.\[\]]", str(error), maxsplit=1)[0])
            if self.path is None or not origin.startswith(f"{self.path}:"):
                raise
            raise ValueError(f"{origin}: {error}") from error

    def _origin(self, written: str) -> str:
        """The origin of an option's value, or of the first option of an entry such as data.datasets[0]."""
        option = re.sub(r"\[(\d+)\]", r".\1", written)
        if written.endswith("]"):
            return next((origin for path, origin in self.origins.items() if path.startswith(f"{option}.")), "")
        return self.origins.get(option, "")


LoadedConfig = Loaded[Config]
LoadedServerConfig = Loaded[ServerConfig]


def load_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Reads the YAML file of a local run, applies `--section.field value` overrides, and checks the result.

    Raises ConfigError, which lists every problem with its place.
    """
    return _load(path, overrides, LOCAL)


def load_server_config(path: Path, overrides: Sequence[str] = ()) -> LoadedServerConfig:
    """Reads the YAML file of a service, applies `--server.field value` overrides, and checks the result.

    Raises ConfigError, which lists every problem with its place.
    """
    return _load(path, overrides, SERVER)


def config_from_mapping(data: Mapping[str, object], overrides: Sequence[str] = ()) -> LoadedConfig:
    """Checks a configuration made in Python, by the same rules. Raises ConfigError."""
    return _finish(Document(node_of(data, Origin("python", "python"))), None, overrides, "the configuration", LOCAL)


def server_config_from_mapping(data: Mapping[str, object], overrides: Sequence[str] = ()) -> LoadedServerConfig:
    """Checks a service's configuration made in Python, by the same rules. Raises ConfigError."""
    return _finish(Document(node_of(data, Origin("python", "python"))), None, overrides, "the configuration", SERVER)


def _load(path: Path, overrides: Sequence[str], schema: Schema[ConfigT]) -> Loaded[ConfigT]:
    name = str(path)
    document = read_document(_text_of(path), name, SECRETS)
    root = document.root or Node(None, Origin("file", f"{name}:1", "", 1))
    read = Document(root if not _is_unreadable(document) else None, document.problems)
    return _finish(read, path, overrides, name, schema)


def _is_unreadable(document: Document) -> bool:
    return document.root is None and bool(document.problems)


def _finish(
    document: Document, path: Path | None, overrides: Sequence[str], name: str, schema: Schema[ConfigT]
) -> Loaded[ConfigT]:
    parsed, problems = parse_overrides(overrides, schema.prefix, SECRETS)
    problems = [*document.problems, *problems]
    if document.root is None:
        raise ConfigError(problems, name)
    problems += apply_overrides_(document.root, parsed)
    config, found = validate(document.root, schema)
    # If a value could not be read, its placeholder is not reported.
    unread = {(problem.path, problem.origin.line) for problem in problems}
    problems += [
        problem
        for problem in found
        if (problem.path, problem.origin.line) not in unread and (problem.path, NO_LINE) not in unread
    ]
    if problems or config is None:
        raise ConfigError(problems, name)
    try:
        resolved, reasons = schema.resolve(config)
    except ValueError as error:
        raise ConfigError([Problem(Origin("environment", "environment"), "", str(error))], name) from error
    return Loaded(resolved, _origins(resolved, document.root, reasons, schema.root), path, tuple(overrides))


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        origin = Origin("file", f"{path}:{line}", "", line)
        raise ConfigError([Problem(origin, "", f"this is not UTF-8 text: {error.reason}")], str(path)) from error
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        if isinstance(error, FileNotFoundError) and path.parent.is_dir():
            others = [str(other) for other in path.parent.glob("*.y*ml")]
            near = difflib.get_close_matches(str(path), others, n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        raise ConfigError([Problem(Origin("file", str(path)), "", message)], str(path)) from error


def _origins(config: ConfigT, root: Node, reasons: Mapping[str, str], kind: type[ConfigT]) -> dict[str, str]:
    """Returns the origin of each option's value, by concrete path."""
    origins: dict[str, str] = {}
    for option in all_options(kind).values():
        paths = [f"{section}.{option.name}".removeprefix(".") for section, _ in entries_of(config, option.section)]
        for path in paths:
            parts = [int(part) if part.isdecimal() else part for part in path.split(".")]
            node = root.find(parts)
            origins[path] = reasons.get(path) or (str(node.origin) if node else "default")
    return origins
