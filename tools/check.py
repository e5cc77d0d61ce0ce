"""The checks that CI and a developer share: `uv run tools/check.py [--only NAME ...] [--fix]`.

Each check prints one line, and its findings if it fails. Tests are not run here.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import check_cycles
import check_layout
import check_locked
import check_sizes
import check_text
import plant_faults
from workspace import ROOT

Check = Callable[[], list[str]]
PARALLEL = 2


def command(*args: str) -> Check:
    """Returns a check that runs a tool of the environment and reports its output if it fails."""

    def run() -> list[str]:
        program = Path(sys.executable).parent / args[0]
        if not program.exists():
            return [f"{args[0]} is not installed beside {sys.executable}: run `uv run tools/check.py`"]
        result = subprocess.run([str(program), *args[1:]], cwd=ROOT, text=True, capture_output=True, check=False)
        return [] if result.returncode == 0 else [(result.stdout + result.stderr).strip()]

    return run


CHECKS: dict[str, Check] = {
    "ruff": command("ruff", "check", "--quiet", "--output-format", "concise"),
    "format": command("ruff", "format", "--check", "--quiet", "--output-format", "concise"),
    "imports": command("lint-imports"),
    "types": command("basedpyright"),
    "spelling": command("codespell"),
    "sizes": check_sizes.violations,
    "layout": check_layout.violations,
    "cycles": check_cycles.violations,
    "text": check_text.violations,
    "docs": command("python", "tools/check_docs.py"),
    "faults": plant_faults.violations,
    "locked": check_locked.violations,
}
FIXES: dict[str, Check] = {
    "ruff": command("ruff", "check", "--fix", "--quiet"),
    "format": command("ruff", "format", "--quiet"),
}


def run_checks(names: Sequence[str], checks: dict[str, Check]) -> list[str]:
    """Runs the named checks, prints one line for each in order, and returns the names of the failed ones."""

    def timed(name: str) -> tuple[list[str], float]:
        start = time.monotonic()
        return checks[name](), time.monotonic() - start

    failed: list[str] = []
    with ThreadPoolExecutor(PARALLEL) as pool:
        for name, (problems, time_s) in zip(names, pool.map(timed, names), strict=True):
            print(f"{'FAIL' if problems else 'ok':4} {name:9} {time_s:5.1f} s", flush=True)
            if problems:
                failed.append(name)
                print("\n".join(f"     {line}" for problem in problems for line in problem.splitlines()), flush=True)
    return failed


def main() -> int:
    """Parses the command line and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CHECKS, help="run only these checks")
    parser.add_argument("--fix", action="store_true", help="first apply ruff's fixes and formatting")
    options = parser.parse_args()
    if options.fix:
        for fix in FIXES.values():
            fix()
    failed = run_checks(options.only or list(CHECKS), CHECKS)
    if failed:
        print(f"failed: {', '.join(failed)}; run a single check with `uv run tools/check.py --only {failed[0]}`")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
