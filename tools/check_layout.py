"""The files lie where a namespace over several distributions needs them."""

from collections import defaultdict
from pathlib import Path

from workspace import project_files


def violations() -> list[str]:
    """Looks for files that would break the namespace, the import of tests or the independence of a CI host."""
    problems: list[str] = []
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for path in project_files():
        problems += [f"{path}: {reason}" for reason in reasons_against(path)]
        if "tests" in path.parts and path.name.startswith("test_"):
            tests[path.name].append(str(path))
    twins = {name: paths for name, paths in tests.items() if len(paths) > 1}
    return problems + [f"{name}: the name of several tests: {', '.join(paths)}" for name, paths in twins.items()]


def reasons_against(path: Path) -> list[str]:
    """Returns why a file may not exist where it is."""
    reasons: list[str] = []
    if path.parts[-2:] == ("xorl", "__init__.py"):
        reasons.append("xorl is a namespace; this file would hide the other distributions")
    if path.name == "__init__.py" and "tests" in path.parts:
        reasons.append("tests are imported by path and are no packages")
    if path.parts[0].startswith(".") and path.parts[0] not in {".ci", ".gitignore", ".gitattributes"}:
        reasons.append("CI is .ci/run alone; no other hidden file belongs here")
    return reasons
