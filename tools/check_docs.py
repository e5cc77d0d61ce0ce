"""Checks that documents and example configurations only use existing options: `uv run tools/check_docs.py`.

Checks `--section.option` and `--server.option` anywhere, `section.option` in code, and the keys of YAML blocks and
files.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from io import StringIO

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from workspace import ROOT, project_files
from xorl.config.local import Config
from xorl.config.options import find_option, sections
from xorl.config.server import ServerConfig

TOP = tuple(Config.model_fields)
OVERRIDE = re.compile(rf"--((?:{'|'.join(TOP)})\.[a-z0-9_.]*[a-z0-9_])")
INLINE = re.compile(rf"`((?:{'|'.join(TOP)})\.[a-z0-9_.\[\]]*[a-z0-9_\]])(?<!\.py)(?=[`:= ])")
SERVER_OVERRIDE = re.compile(r"--server\.([a-z0-9_.]*[a-z0-9_])")
YAML_BLOCK = re.compile(r"^ *```ya?ml\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def main() -> int:
    """Prints every unknown name and returns the exit code."""
    problems: list[str] = []
    for path in project_files():
        text = (ROOT / path).read_text(encoding="utf-8") if path.suffix in {".md", ".yaml", ".yml"} else ""
        names = unknown_in_yaml(text) if path.suffix != ".md" else unknown_in_markdown(text)
        problems += [f"{path}: {name}" for name in dict.fromkeys(names)]
    print("\n".join(problems))
    return 1 if problems else 0


def unknown_in_markdown(text: str) -> Iterator[str]:
    """Yields the unknown options in a Markdown document."""
    for pattern in (OVERRIDE, INLINE):
        for match in pattern.finditer(text):
            if not exists(match.group(1)):
                yield f"unknown option {match.group(1)}"
    for match in SERVER_OVERRIDE.finditer(text):
        if find_option(match.group(1), ServerConfig) is None:
            yield f"unknown option of the service {match.group(1)}"
    for block in YAML_BLOCK.finditer(text):
        yield from unknown_in_yaml(block.group(1))


def exists(name: str) -> bool:
    """Whether a name is an option, a section or a module."""
    module = f"*/src/xorl/{name.replace('.', '/')}"
    found = any((ROOT / "packages").glob(module)) or any((ROOT / "packages").glob(f"{module}.py"))
    return found or name in sections() or find_option(name) is not None


def unknown_in_yaml(text: str) -> Iterator[str]:
    """Yields unknown options below the sections of a configuration; other YAML is ignored."""
    try:
        documents = list(YAML(typ="safe").load_all(StringIO(text)))
    except YAMLError as error:
        yield f"not YAML: {error}"
        return
    for document in documents:
        if isinstance(document, Mapping):
            for section in TOP:
                yield from _unknown_below(document.get(section), section)


def _unknown_below(value: object, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            inner = f"{path}.{key}"
            if find_option(inner) is None and inner not in sections():
                yield f"unknown option {inner}"
            elif inner in sections() or isinstance(item, list):
                yield from _unknown_below(item, inner)
    elif isinstance(value, list):
        for position, item in enumerate(value):
            if isinstance(item, Mapping):
                yield from _unknown_below(item, f"{path}.{position}")


if __name__ == "__main__":
    sys.exit(main())
