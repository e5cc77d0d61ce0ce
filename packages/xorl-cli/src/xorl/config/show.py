"""The output of `xorl config`: a configuration with the origin of each value, or the documentation of the options."""

import difflib
import textwrap
from collections.abc import Callable, Iterable, Iterator

from pydantic import JsonValue, Secret

from xorl.config.fields import Section
from xorl.config.load import ConfigWithOrigins
from xorl.config.local import Config
from xorl.config.options import OWNERS, Option, all_options, documented_path, sections, suggestion, yaml_text
from xorl.config.server import ServerConfig
from xorl.config.server_conflicts import server_unsupported_values
from xorl.config.unsupported import UnsupportedValues, unsupported_values
from xorl.config.validate import ConfigT

MAX_COMMENT_COLUMN = 56  # longer lines do not move the comments of the others
WIDTH = 100


def show(loaded: ConfigWithOrigins[ConfigT], *, with_secrets: bool = False) -> str:
    """Returns YAML that loads to the same configuration; without `with_secrets`, secrets are masked."""
    rows = list(_rows(loaded, loaded.config, "", "", with_secrets=with_secrets))
    column = max((len(text) for text, origin in rows if origin and len(text) < MAX_COMMENT_COLUMN), default=0)
    return "".join(f"{text:<{column}}  # {origin}\n" if origin else f"{text}\n" for text, origin in rows)


def _rows(
    loaded: ConfigWithOrigins[ConfigT], options: Section, path: str, indent: str, *, with_secrets: bool
) -> Iterator[tuple[str, str]]:
    """Yields (line, origin) for each option; the origin is empty for lines without a value."""
    without_effect = {option.path: option for option in loaded.without_effect}

    def row(here: str, start: str, value: object) -> tuple[str, str]:
        if here not in without_effect:
            return f"{start}: {yaml_text(value)}", loaded.origins[here]
        option = without_effect[here]
        return f"{start}: {yaml_text(option.value)}", f"{loaded.origins[here]}, no effect {option.condition}"

    for name in type(options).model_fields:
        here, value = f"{path}{name}", getattr(options, name)
        if isinstance(value, Section):
            yield f"{indent}{name}:", ""
            yield from _rows(loaded, value, f"{here}.", f"{indent}  ", with_secrets=with_secrets)
        elif here in OWNERS.values() and value:
            yield f"{indent}{name}:", ""
            for index, entry in enumerate(value):
                for position, field in enumerate(type(entry).model_fields):
                    mark = "-" if position == 0 else " "
                    yield row(f"{here}.{index}.{field}", f"{indent}  {mark} {field}", getattr(entry, field))
        else:
            if isinstance(value, Secret):
                # str(Secret) is a row of asterisks.
                value = value.get_secret_value() if with_secrets else str(value)
            yield row(here, f"{indent}{name}", value)


def documentation(query: str | None = None, root: type[Section] = Config) -> str:
    """Returns the text for every option, for a section or group, or for one option by path or name.

    Raises ValueError if `query` matches none of them.
    """
    options = all_options(root)
    find_unsupported = server_unsupported_values if root is ServerConfig else unsupported_values
    if query is None:
        return _text(options.values(), find_unsupported)
    path = documented_path(query)
    chosen = [option for option in options.values() if path in (option.path, option.name, option.section)]
    if not chosen:
        chosen = [option for option in options.values() if path.lower() == option.group.lower()]
    if path == "data":
        chosen = [option for option in options.values() if option.path.startswith("data.")]
    if not chosen:
        message, meant = suggestion(path, root)
        near = difflib.get_close_matches(path, [*sections(root), *(option.name for option in options.values())], n=1)
        hint = f"; did you mean {meant or near[0]}?" if meant or near else f": {message}"
        raise ValueError(f"there is no section or option {query}{hint}")
    return _text(chosen, find_unsupported)


def json_schema(root: type[Section] = Config) -> dict[str, JsonValue]:
    """Returns the JSON schema of the whole configuration, for completion and checking in editors."""
    title = f"xorl {(root.__doc__ or '').lower()}"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | root.model_json_schema() | {"title": title}


def _text(options: Iterable[Option], find_unsupported: Callable[[str], Iterable[UnsupportedValues]]) -> str:
    lines: list[str] = []
    heading = ""
    for option in options:
        title = f"# {option.section or option.group}" + ("" if option.section != "train" else f": {option.group}")
        if title != heading:
            lines += ["", title, ""] if lines else [title, ""]
            heading = title
        default = "required" if option.default is None else f"default {option.default}"
        lines.append(f"{option.path}: {option.type}; {default}")
        for paragraph in (option.description, *(row.summary() for row in find_unsupported(option.path))):
            lines += textwrap.wrap(paragraph, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"
