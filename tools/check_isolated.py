"""Each distribution works alone: `uv run tools/check_isolated.py [NAME ...]`.

For each one uv makes a throw-away environment that holds that distribution, its locked dependencies and pytest. There
the other distributions must be absent, the first example of the README must run, and the tests must pass.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from workspace import ROOT, Distribution, distributions, locked_version, uv

TEST_TOOLS = ("pytest", "pytest-timeout")
PARALLEL = 2
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def main() -> int:
    """Tests the named distributions, or all, and returns the exit code."""
    known = distributions()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*known, []], help="distributions, all of them if none is given")
    parser.add_argument("--inside", choices=known, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return _inside(known[options.inside])
    with ThreadPoolExecutor(PARALLEL) as pool:
        codes = list(pool.map(_in_own_environment, options.names or known))
    return max(codes)


def _in_own_environment(name: str) -> int:
    """Runs `--inside` in an environment of its own and prints a line, and all of its output if it failed."""
    versions = [argument for tool in TEST_TOOLS for argument in ("--with", f"{tool}=={locked_version(tool)}")]
    environment = ("--isolated", "--exact", "--frozen", "--package", name, *versions)
    start = time.monotonic()
    result = subprocess.run(
        [uv(), "run", *environment, "python", __file__, "--inside", name],
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
    if result.returncode:
        print("\n".join(f"     {line}" for line in lines), flush=True)
    return min(result.returncode, 1) if result.returncode >= 0 else 1


def _inside(distribution: Distribution) -> int:
    """Checks the environment, runs the README's first example and the tests."""
    problems = _wrong_neighbours(distribution)
    if problems:
        print("\n".join(problems))
        return 1
    with tempfile.TemporaryDirectory() as folder:
        example = subprocess.run([sys.executable, "-c", _first_example(distribution)], cwd=folder, check=False)
    if example.returncode:
        print(f"the first example of {distribution.folder.relative_to(ROOT)}/README.md failed")
        return 1
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(distribution.folder / "tests")]
    return subprocess.run(pytest, cwd=ROOT, check=False).returncode


def _wrong_neighbours(distribution: Distribution) -> list[str]:
    """Returns which modules of xorl are importable and should not be, or the reverse."""
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


def _first_example(distribution: Distribution) -> str:
    """Returns the first Python block of a README."""
    block = PYTHON_BLOCK.search((distribution.folder / "README.md").read_text(encoding="utf-8"))
    return block.group(1) if block else "raise SystemExit('README.md shows no Python example')"


if __name__ == "__main__":
    sys.exit(main())
