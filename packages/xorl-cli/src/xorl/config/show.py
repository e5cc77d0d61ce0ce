"""Formats a configuration as YAML, with the origin of each value as a comment."""

from collections.abc import Iterator

from pydantic import Secret

from xorl.config.fields import Section
from xorl.config.load import ConfigWithOrigins
from xorl.config.options import OWNERS, yaml_text
from xorl.config.schema import ConfigT

MAX_COMMENT_COLUMN = 56  # longer lines do not move the comments of the others


def show(loaded: ConfigWithOrigins[ConfigT], *, with_secrets: bool = False) -> str:
    """Returns YAML that loads to the same configuration; without `with_secrets`, secrets are masked."""
    rows = list(_rows(loaded.config, "", "", loaded.origins, with_secrets=with_secrets))
    column = max((len(text) for text, origin in rows if origin and len(text) < MAX_COMMENT_COLUMN), default=0)
    return "".join(f"{text:<{column}}  # {origin}\n" if origin else f"{text}\n" for text, origin in rows)


def _rows(
    options: Section, path: str, indent: str, origins: dict[str, str], *, with_secrets: bool
) -> Iterator[tuple[str, str]]:
    """Yields (line, origin) for each option; the origin is empty for lines without a value."""
    for name in type(options).model_fields:
        here, value = f"{path}{name}", getattr(options, name)
        if isinstance(value, Section):
            yield f"{indent}{name}:", ""
            yield from _rows(value, f"{here}.", f"{indent}  ", origins, with_secrets=with_secrets)
        elif here in OWNERS.values() and value:
            yield f"{indent}{name}:", ""
            for index, entry in enumerate(value):
                for position, field in enumerate(type(entry).model_fields):
                    mark = "-" if position == 0 else " "
                    text = f"{indent}  {mark} {field}: {yaml_text(getattr(entry, field))}"
                    yield text, origins[f"{here}.{index}.{field}"]
        else:
            if isinstance(value, Secret):
                # str(Secret) is a row of asterisks.
                value = value.get_secret_value() if with_secrets else str(value)
            yield f"{indent}{name}: {yaml_text(value)}", origins[here]
