"""Checks that each distribution works by itself: `uv run tools/check_isolated.py [--ran REPORT] [NAME ...]`.

For each one, uv creates a temporary environment with the distribution, its locked dependencies and the test tools. In
it, the other distributions must be absent, everything that the sources import (also inside functions) must be present,
every example of the README must run, and the tests must pass. Failed tests are run a second time, because flaky
tests are a matter of the full test run. `--ran` is the report of that run (`pytest --junitxml`): tests that were slow
in it are skipped, because their imports are checked anyway.
"""

import argparse
import ast
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeGuard
from xml.etree import ElementTree

from workspace import ROOT, Distribution, distributions, locked_version, uv

TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")
TESTS_FAILED = 1  # pytest's exit code
PARALLEL = 2
LONG_S = 0.3
# The type checker's marker on optional imports, which the code guards.
MAY_BE_MISSING = "reportMissingImports"
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def main() -> int:
    """Checks the named distributions, or all of them, and returns the exit code."""
    known = distributions()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*known, []], help="distributions [all]")
    parser.add_argument("--ran", type=Path, help="skip the tests that were slow in this report")
    parser.add_argument("--inside", choices=known, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return _inside(known[options.inside], options.ran)
    with ThreadPoolExecutor(PARALLEL) as pool:
        codes = list(pool.map(partial(_in_own_environment, ran=options.ran), options.names or known))
    return max(codes)


def _in_own_environment(name: str, ran: Path | None) -> int:
    """Runs `--inside` in a separate environment and prints one line, followed by all output if a test failed."""
    versions = [argument for tool in TEST_TOOLS for argument in ("--with", f"{tool}=={locked_version(tool)}")]
    environment = ("--isolated", "--exact", "--frozen", "--package", name, *versions)
    report = () if ran is None else ("--ran", str(ran.resolve()))
    start = time.monotonic()
    result = subprocess.run(
        [uv(), "run", *environment, "python", __file__, "--inside", name, *report],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key not in {"PYTEST_ADDOPTS", "PYTHONPATH"}},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    lines = result.stdout.strip().splitlines() or ["no output"]
    verdict = "FAIL" if result.returncode else "ok"
    print(f"{verdict:4} {name:13} {time.monotonic() - start:5.1f} s  {lines[-1]}", flush=True)
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if result.returncode or failed:
        print("\n".join(f"     {line}" for line in failed + lines), flush=True)
    return min(result.returncode, 1) if result.returncode >= 0 else 1


def _inside(distribution: Distribution, ran: Path | None) -> int:
    """Checks the environment and the imports, and runs the README's examples and the tests."""
    problems = _wrong_neighbours(distribution) + _unmet_imports(distribution)
    if problems:
        print("\n".join(problems))
        return 1
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _examples(distribution)]
        example = subprocess.run(command, cwd=folder, text=True, capture_output=True, check=False)
    if example.returncode:
        print(f"{example.stdout}{example.stderr}")
        print(f"an example of {distribution.folder.relative_to(ROOT)}/README.md failed")
        return 1
    tests = distribution.folder / "tests"
    left_out = () if ran is None else _that_took_long(ran, str(tests.relative_to(ROOT)))
    with tempfile.TemporaryDirectory() as cache:
        pytest = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", str(tests)]
        code = subprocess.run([*pytest, *(f"--deselect={test}" for test in left_out)], cwd=ROOT, check=False).returncode
        if code != TESTS_FAILED:
            return code
        print("=== repeating the failed tests; those that pass now do not need the other distributions", flush=True)
        return subprocess.run([*pytest, "--last-failed"], cwd=ROOT, check=False).returncode


def _that_took_long(report: Path, folder: str) -> Iterator[str]:
    """Yields the slow tests of a folder."""
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        if file.startswith(f"{folder}/") and float(case.get("time", 0)) > LONG_S:
            yield f"{file}::{case.get('name')}"


def _unmet_imports(distribution: Distribution) -> list[str]:
    """Returns the import statements in the sources, also inside functions, whose module is missing."""
    return [
        f"{file.relative_to(ROOT)}:{line}: imports {name}, which is not installed with {distribution.name} alone"
        for file in sorted((distribution.folder / "src").rglob("*.py"))
        for line, name in imports(file.read_text(encoding="utf-8"))
        if importlib.util.find_spec(name) is None
    ]


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, package) of each required import: a subpackage of xorl, or another top-level package."""
    lines, nodes = source.splitlines(), list(ast.walk(ast.parse(source)))
    optional = {
        inner for node in nodes if _tolerates_missing(node) for statement in node.body for inner in ast.walk(statement)
    }
    for node in nodes:
        match node:
            case ast.Import():
                modules = [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(module)):
                modules = [f"{module}.{alias.name}" for alias in node.names]
            case _:
                continue
        if node not in optional and MAY_BE_MISSING not in lines[node.lineno - 1]:
            for module in modules:
                yield node.lineno, ".".join(module.split(".")[: 2 if module.startswith("xorl.") else 1])


def _tolerates_missing(node: ast.AST) -> TypeGuard[ast.Try | ast.If]:
    """Whether imports in the body of a statement may fail: its handlers catch that, or only type checkers run it."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.Try) and any(_is_import_error(handler.type) for handler in node.handlers)


def _is_import_error(caught: ast.expr | None) -> bool:
    """Whether an `except` clause catches a missing import."""
    return isinstance(caught, ast.Name) and caught.id in {"ImportError", "ModuleNotFoundError"}


def _wrong_neighbours(distribution: Distribution) -> list[str]:
    """Returns the modules of xorl that are importable but should not be, and the reverse."""
    known = distributions()
    wanted, open_names = set(distribution.modules), list(distribution.siblings)
    while open_names:
        sibling = known[re.split(r"[^a-z-]", open_names.pop())[0]]
        wanted |= set(sibling.modules)
        open_names += sibling.siblings
    problems: list[str] = []
    for module in (module for other in known.values() for module in other.modules):
        if (importlib.util.find_spec(module) is not None) != (module in wanted):
            state = "missing from" if module in wanted else "importable in"
            problems.append(f"{module} is {state} an environment of {distribution.name} alone")
    return problems


def _examples(distribution: Distribution) -> str:
    """Returns a program that runs all Python blocks of a README, each with names of its own."""
    blocks = PYTHON_BLOCK.findall((distribution.folder / "README.md").read_text(encoding="utf-8"))
    lines = [
        f"exec(compile({block!r}, 'README.md, example {number}', 'exec'), {{'__name__': '__main__'}})"
        for number, block in enumerate(blocks, 1)
    ]
    return "\n".join(lines) or "raise SystemExit('README.md shows no Python example')"


if __name__ == "__main__":
    sys.exit(main())
