"""Checks for import cycles, whose files can only be read, moved and tested together."""

import tomllib
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

import grimp

from workspace import ROOT


def violations() -> list[str]:
    """Finds an import cycle in each package that import-linter checks."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    problems: list[str] = []
    for package in config["tool"]["importlinter"]["root_packages"]:
        graph = grimp.build_graph(package, cache_dir=None)
        cycle = first_cycle({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
        if cycle:
            problems.append(f"{' -> '.join(cycle)}: an import cycle; move what they share to a file that each imports")
    return problems


def first_cycle(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """The modules of a cycle, each importing the next, the first one repeated at the end; empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])[::-1]
    return []
