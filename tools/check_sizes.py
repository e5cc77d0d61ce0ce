"""Checks that files and functions are short enough to read in one go.

Exceptions are listed in sizes_allowed.txt as `path lines` or `path::function lines`. The list may only shrink: an entry
that is too low, too high or no longer needed is an error.
"""

import ast
from pathlib import Path

from workspace import ROOT, project_files

MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 80
KERNEL_FILE_LINES, KERNEL_FUNCTION_LINES = 700, 150
KERNELS = Path("packages/xorl-kernels/src")
ALLOWED = ROOT / "tools" / "sizes_allowed.txt"


def violations() -> list[str]:
    """Compares every Python file with the limits and with the list of exceptions."""
    too_long: dict[str, tuple[int, int]] = {}
    for path in project_files():
        if path.suffix == ".py":
            too_long |= _too_long(path)
    return compare(too_long, _allowed())


def _too_long(path: Path) -> dict[str, tuple[int, int]]:
    """Returns {path or path::function: (lines, limit)} for everything over its limit; test functions have none."""
    in_kernels = path.is_relative_to(KERNELS)
    file_limit = KERNEL_FILE_LINES if in_kernels else MAX_FILE_LINES
    function_limit = KERNEL_FUNCTION_LINES if in_kernels else MAX_FUNCTION_LINES
    source = (ROOT / path).read_text(encoding="utf-8")
    sizes = {path.as_posix(): (len(source.splitlines()), file_limit)}
    if "tests" not in path.parts:
        for name, lines in functions(ast.parse(source), ""):
            sizes[f"{path.as_posix()}::{name}"] = (lines, function_limit)
    return {name: (lines, limit) for name, (lines, limit) in sizes.items() if lines > limit}


def functions(node: ast.AST, prefix: str) -> list[tuple[str, int]]:
    """Returns (qualified name, lines) of every function under a node, including nested ones."""
    found: list[tuple[str, int]] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                found.append((name, (child.end_lineno or child.lineno) - child.lineno + 1))
            found += functions(child, f"{name}.")
        else:
            found += functions(child, prefix)
    return found


def _allowed() -> dict[str, int]:
    """Reads the exceptions."""
    entries: dict[str, int] = {}
    for line in ALLOWED.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            name, lines = line.rsplit(maxsplit=1)
            entries[name] = int(lines)
    return entries


def compare(too_long: dict[str, tuple[int, int]], allowed: dict[str, int]) -> list[str]:
    """Returns one line for each difference between the sizes over a limit and the allowed exceptions."""
    problems: list[str] = []
    for name, (lines, limit) in sorted(too_long.items()):
        if name not in allowed:
            problems.append(f"{name}: {lines} lines, the limit is {limit}")
        elif lines > allowed[name]:
            problems.append(f"{name}: {lines} lines, {ALLOWED.name} allows {allowed[name]}")
        elif lines < allowed[name]:
            problems.append(f"{name}: {lines} lines; lower its entry in {ALLOWED.name} from {allowed[name]}")
    idle = sorted(allowed.keys() - too_long.keys())
    return problems + [f"{name}: no longer needed in {ALLOWED.name}" for name in idle]
