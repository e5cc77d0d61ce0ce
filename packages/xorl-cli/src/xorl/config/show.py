"""A checked configuration as YAML, each value with a comment that says where it is from."""

from xorl.config.load import LoadedConfig
from xorl.config.local import Config
from xorl.config.options import ENTRY_LISTS, MEMBER_LIST, yaml_text

MAX_COMMENT_COLUMN = 56  # a longer value pushes its own comment out, not those of all others


def show(loaded: LoadedConfig) -> str:
    """Returns YAML that loads to the same configuration."""
    rows: list[tuple[str, str]] = []
    for section in Config.model_fields:
        options = getattr(loaded.config, section)
        rows.append((f"{section}:", ""))
        for name in type(options).model_fields:
            path, value = f"{section}.{name}", getattr(options, name)
            if path in (*ENTRY_LISTS, MEMBER_LIST) and value:
                rows.append((f"  {name}:", ""))
                for index, entry in enumerate(value):
                    rows += [
                        (
                            f"    {'-' if position == 0 else ' '} {field}: {yaml_text(getattr(entry, field))}",
                            loaded.origins[f"{path}.{index}.{field}"],
                        )
                        for position, field in enumerate(type(entry).model_fields)
                    ]
            else:
                rows.append((f"  {name}: {yaml_text(value)}", loaded.origins[path]))
    column = max((len(text) for text, origin in rows if origin and len(text) < MAX_COMMENT_COLUMN), default=0)
    return "".join(f"{text:<{column}}  # {origin}\n" if origin else f"{text}\n" for text, origin in rows)
