"""The documentation of the options, as text for people and as a JSON schema for editors."""

import difflib
import textwrap
from collections.abc import Iterable

from pydantic import JsonValue

from xorl.config.local import Config
from xorl.config.options import Option, all_options, general_path, sections, suggestion
from xorl.config.refusals import refusals_of

WIDTH = 100


def documentation(query: str | None = None) -> str:
    """Returns the text for every option, a section, or one option, by path or by name alone.

    Raises ValueError for a name that is none of these.
    """
    options = all_options()
    if query is None:
        return _text(options.values())
    path = general_path(query)
    chosen = [option for option in options.values() if path in (option.path, option.name, option.section)]
    if path == "data":
        chosen = [option for option in options.values() if option.path.startswith("data.")]
    if not chosen:
        message, meant = suggestion(path)
        near = difflib.get_close_matches(path, [*sections(), *(option.name for option in options.values())], n=1)
        hint = f"; did you mean {meant or near[0]}?" if meant or near else f": {message}"
        raise ValueError(f"there is no section or option {query}{hint}")
    return _text(chosen)


def json_schema() -> dict[str, JsonValue]:
    """Returns the JSON schema of the whole configuration, for completion and checking in editors."""
    schema = Config.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema | {"title": "xorl local training"}


def _text(options: Iterable[Option]) -> str:
    lines: list[str] = []
    heading = ""
    for option in options:
        title = f"# {option.section}" + ("" if option.section != "train" else f": {option.group}")
        if title != heading:
            lines += ["", title, ""] if lines else [title, ""]
            heading = title
        default = "required" if option.default is None else f"default {option.default}"
        lines.append(f"{option.path}: {option.type}; {default}")
        for paragraph in (option.description, *(row.summary() for row in refusals_of(option.path))):
            lines += textwrap.wrap(paragraph, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"
