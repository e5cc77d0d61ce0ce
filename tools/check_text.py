"""Checks that no text in the project depends on a particular machine."""

import re

from workspace import ROOT, project_files

GENERATED = {"uv.lock"}
FORBIDDEN = {
    "a package registry": re.compile(
        r"\b(?:(?:test\.)?pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|download\.pytorch\.org|pypi\.nvidia\.com)"
        r"|--(?:extra-)?index-url\b|--find-link[s]\b"
    ),
    "a path of one machine": re.compile(r"(?<![\w.~/])/(?:home|root|Users|work|opt|srv)/\w"),
    "a file URL": re.compile(r"\bfile:///\w"),
}


def violations() -> list[str]:
    """Searches all text files for names that only exist on one machine."""
    problems: list[str] = []
    for path in project_files():
        if path.name in GENERATED:
            continue
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        problems += [f"{path}:{problem}" for problem in problems_in(text)]
    return problems


def problems_in(text: str) -> list[str]:
    """Returns one `line: problem` string for each forbidden name in a text."""
    return [
        f"{number}: {match.group()!r} is {what}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in FORBIDDEN.items()
        for match in pattern.finditer(line)
    ]
