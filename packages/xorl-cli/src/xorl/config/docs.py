"""The documentation of the options, as text and as a JSON schema for editors."""

import difflib
import textwrap
from collections.abc import Callable, Iterable

from pydantic import JsonValue

from xorl.config.fields import Section
from xorl.config.local import Config
from xorl.config.options import Option, all_options, documented_path, sections, suggestion
from xorl.config.server import ServerConfig
from xorl.config.server_unsupported import server_unsupported_values
from xorl.config.unsupported import UnsupportedValues, unsupported_values

WIDTH = 100


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
