"""Checks the file layout that a namespace package over several distributions needs."""

from collections import defaultdict
from pathlib import Path

from workspace import project_files


def violations() -> list[str]:
    """Finds files that would break the namespace, the import of tests or the independence from a CI host."""
    problems: list[str] = []
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for path in project_files():
        problems += [f"{path}: {reason}" for reason in reasons_against(path)]
        if "tests" in path.parts and path.name.startswith("test_"):
            tests[path.name].append(str(path))
    twins = {name: paths for name, paths in tests.items() if len(paths) > 1}
    return problems + [f"{name}: several tests have this name: {', '.join(paths)}" for name, paths in twins.items()]


def reasons_against(path: Path) -> list[str]:
    """Returns the reasons why a file must not exist at this path."""
    reasons: list[str] = []
    if path.parts[-2:] == ("xorl", "__init__.py"):
        reasons.append("xorl is a namespace package; this file would hide the other distributions")
    if path.name == "__init__.py" and "tests" in path.parts:
        reasons.append("tests are imported by path and must not be packages")
    if path.parts[0].startswith(".") and path.parts[0] not in {".ci", ".gitignore", ".gitattributes"}:
        reasons.append("CI consists only of .ci/run; remove other hidden files")
    return reasons
