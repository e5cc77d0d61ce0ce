"""Runs a phase of CI unless it passed with all that it tests: `uv run tools/unless_passed.py [--all] PHASE COMMAND...`.

The phases that build environments take minutes and fail for few reasons. `passed.json` has, for each one, a hash of
everything it tests as of the last time that it passed. If the hash is still the same, the phase is left out and this
is printed; with `--all` it runs all the same. A phase that passes updates the file, which is committed with the change.
"""

import argparse
import ast
import hashlib
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from check_isolated import PYTHON_BLOCK, imports
from check_torch import QUICK
from workspace import ROOT, distributions, project_files

RECORD = ROOT / "tools" / "passed.json"
# Also finds the imports of programs that tests keep as text, and modules that are imported or run by name.
IMPORT_LINE = re.compile(r"(?:^|[\"';\n])[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import\b|import[ \t]+([\w.]+))", re.MULTILINE)
OWN_PARTS = re.compile(r"\bfrom xorl import ([\w, ]+)")
OWN_MODULE = re.compile(r"\bxorl\.[a-z]\w*")


def main() -> int:
    """Runs the command if needed, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="run it whether or not it passed")
    parser.add_argument("phase", choices=INPUTS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    recorded, current = _recorded(), fingerprint(options.phase)
    described = INPUTS[options.phase].__doc__
    if current == recorded.get(options.phase) and not options.all:
        print(f"left out: {options.phase} passed before, and nothing it tests has changed since. {described}")
        print("`.ci/run --all` runs it.")
        return 0
    code = subprocess.run(options.command, cwd=ROOT, check=False).returncode
    if code == 0 and current != recorded.get(options.phase):
        RECORD.write_text(json.dumps({**recorded, options.phase: current}, indent=2, sort_keys=True) + "\n")
        print(f"updated {RECORD.relative_to(ROOT)}: commit it, and {options.phase} is left out until something changes")
    return code


def _recorded() -> dict[str, str]:
    """Returns the hash with which each phase last passed."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def fingerprint(phase: str) -> str:
    """Returns a hash of everything that a phase tests, and of Python's version."""
    digest = hashlib.sha256(f"Python {sys.version_info.major}.{sys.version_info.minor}\0".encode())
    for item in INPUTS[phase]():
        digest.update(item.encode() + b"\0")
    return digest.hexdigest()[:16]


def _isolated() -> Iterator[str]:
    """It tests the dependencies of each distribution, its imports, those of its tests, and its README's examples."""
    yield from _texts("pyproject.toml", "uv.lock", "conftest.py", "tools/check_isolated.py", "tools/workspace.py")
    yield from _texts(*(f"{folder}/pyproject.toml" for folder in _folders()))
    for folder in [*_folders(), "tests/support"]:
        yield f"imports of {folder}"
        yield from sorted({name for text in _sources(folder) for name in packages_imported(text)})
    for folder in _folders():
        yield f"imports of {folder} that must not be missing"
        yield from sorted({name for text in _sources(f"{folder}/src") for _, name in imports(text)})
        yield from PYTHON_BLOCK.findall((ROOT / folder / "README.md").read_text(encoding="utf-8"))


def _wheels() -> Iterator[str]:
    """It tests the metadata of the distributions, which files their wheels contain, and what they import of xorl."""
    yield from _texts(".gitignore", "uv.lock", "tools/check_wheels.py", "tools/workspace.py")
    for folder in _folders():
        yield from _texts(f"{folder}/pyproject.toml", f"{folder}/README.md")
        files = [file for file in project_files() if file.is_relative_to(f"{folder}/src")]
        yield from sorted({str(file.parent if file.suffix == ".py" else file) for file in files})
        yield from sorted({name for text in _sources(f"{folder}/src") for name in packages_imported(text)})


def _newest_torch() -> Iterator[str]:
    """It tests private parts of torch and what is imported from torch. A new release of torch is not noticed."""
    yield from _texts("tools/check_torch.py", "tools/workspace.py", "conftest.py")
    for distribution, tests in QUICK.items():
        folder = str(distributions()[distribution].folder.relative_to(ROOT))
        [private] = [
            file for file in project_files() if file.is_relative_to(folder) and file.name == "torch_private.py"
        ]
        yield from _texts(f"{folder}/pyproject.toml", str(private))
        sources = itertools.chain(_sources(f"{folder}/src"), *(_sources(f"{folder}/tests/{test}") for test in tests))
        yield from sorted({name for text in sources for name in names_of_torch(text)})


INPUTS: dict[str, Callable[[], Iterator[str]]] = {"isolated": _isolated, "wheels": _wheels, "torch": _newest_torch}


def packages_imported(source: str) -> set[str]:
    """Returns the packages that a source, or a program within it, may import: a part of xorl, or a top-level one."""
    modules = {module for match in IMPORT_LINE.findall(source) for module in match if module}
    own = {".".join(module.split(".")[:2]) for module in modules if module.startswith("xorl.")}
    others = {module.split(".")[0] for module in modules if module.split(".")[0] not in ("", "xorl")}
    whole = {f"xorl.{name}" for names in OWN_PARTS.findall(source) for name in re.findall(r"\w+", names)}
    return own | others | whole | set(OWN_MODULE.findall(source))


def names_of_torch(source: str) -> Iterator[str]:
    """Yields each module of torch that a source imports, and each name that it imports from one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "torch")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _folders() -> list[str]:
    """Returns the folders of the distributions."""
    return sorted(str(member.folder.relative_to(ROOT)) for member in distributions().values())


def _sources(folder: str) -> Iterator[str]:
    """Yields the Python sources of a folder, or of a file."""
    for file in project_files():
        if file.suffix == ".py" and file.is_relative_to(Path(folder)):
            yield (ROOT / file).read_text(encoding="utf-8")


def _texts(*names: str) -> Iterator[str]:
    """Yields the content of files, each after its name."""
    for name in names:
        yield name
        yield (ROOT / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
