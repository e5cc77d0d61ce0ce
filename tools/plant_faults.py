"""Plants the faults of tests/faults.toml in a copy of the project, one at a time, and runs the tests that should fail.

    uv run tools/plant_faults.py [--only NAME ...] [--list]

Prints one line for each fault: caught, and by which test, or escaped. A test that also fails without the fault catches
nothing. The exit code is 1 if a fault escapes, and 2 if one cannot be tried, because its text does not occur exactly
once in its file, or its tests do not exist. The working tree is copied with its uncommitted changes and is never
modified.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from workspace import ROOT, project_files

FAULTS = Path("tests/faults.toml")
# pytest's exit codes: https://docs.pytest.org/en/stable/reference/exit-codes.html
PASSED, FAILED = 0, 1
# A line of pytest's summary: the names of parameters may contain spaces and dashes.
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\[\s]+(?:\[.*?\])?)?)(?: - .*)?$", re.MULTILINE)
Verdict: TypeAlias = Literal["caught", "escaped", "broken"]


@dataclass(frozen=True)
class Fault:
    """A mistake in one file: `old` becomes `new`. tests: arguments of pytest. effect: what a user would see."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    effect: str

    def planted_in(self, text: str) -> str:
        """Returns the text of the file with the fault. Raises ValueError unless `old` occurs exactly once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its text occurs {count} times in {self.file}, not once; update {FAULTS}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Attempt:
    """A run of pytest: its exit code, the failed tests, its output and duration."""

    code: int
    failed: tuple[str, ...]
    output: str
    seconds: float


def main() -> int:
    """Tries the chosen faults and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="try only these faults")
    parser.add_argument("--list", action="store_true", help="print the faults, and try none")
    options = parser.parse_args()
    # A second signal must not leave the processes of a test behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    faults = read_faults()
    unknown = set(options.only or ()) - {fault.name for fault in faults}
    if unknown:
        parser.error(f"--only: there is no fault {', '.join(sorted(unknown))}")
    chosen = [fault for fault in faults if not options.only or fault.name in options.only]
    if options.list:
        for fault in chosen:
            print(f"{fault.name}: {fault.effect}\n    {fault.file}\n    {fault.tests}")
        return 0
    if problems := misplaced(chosen):
        print("\n".join(problems))
        return 2
    return try_all(chosen)


def violations() -> list[str]:
    """Finds faults of the table that can no longer be tried."""
    return misplaced(read_faults())


def read_faults() -> list[Fault]:
    """Returns the faults of the table in its order. Raises ValueError if two have the same name."""
    table = tomllib.loads((ROOT / FAULTS).read_text(encoding="utf-8"))
    faults = [Fault(**entry) for entry in table["fault"]]
    names = [fault.name for fault in faults]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{FAULTS}: several faults are named {', '.join(repeated)}")
    return faults


def misplaced(faults: Sequence[Fault]) -> list[str]:
    """Returns one line for each fault that can no longer be planted, and for each file of tests that does not exist."""
    problems: list[str] = []
    for fault in faults:
        path = ROOT / fault.file
        try:
            fault.planted_in(path.read_text(encoding="utf-8") if path.exists() else "")
        except ValueError as error:
            problems.append(str(error))
        for word in shlex.split(fault.tests):
            if word.startswith(("tests/", "packages/")) and not (ROOT / word.partition("::")[0]).exists():
                problems.append(f"{fault.name}: there is no {word}; update {FAULTS}")
    return problems


def try_all(faults: Sequence[Fault]) -> int:
    """Tries the faults in a copy of the project, prints a summary, and returns the exit code."""
    with copied() as copy:
        found = verdicts(faults, copy)
    print(", ".join(f"{list(found.values()).count(verdict)} {verdict}" for verdict in get_args(Verdict)))
    for verdict in ("escaped", "broken"):
        if names := [name for name, other in found.items() if other == verdict]:
            print(f"{verdict}: {', '.join(names)}")
    return 2 if "broken" in found.values() else 1 if "escaped" in found.values() else 0


def verdicts(faults: Sequence[Fault], copy: Path) -> dict[str, Verdict]:
    """Tries the faults in turn, prints a line for each, and then runs the tests that caught them without any fault.

    broken: the tests could not be run, or the test that failed also fails without the fault.
    """
    found: dict[str, Verdict] = {}
    caught_by: dict[str, str] = {}
    for fault in faults:
        attempt = attempt_with(fault, copy)
        if attempt.code == FAILED and attempt.failed:
            caught_by[fault.name] = attempt.failed[0]
            found[fault.name], by = "caught", f" by {attempt.failed[0]}"
        else:
            found[fault.name], by = ("escaped" if attempt.code == PASSED else "broken"), ""
        if found[fault.name] == "broken":
            print(f"{attempt.output[-3000:]}\npytest ended with {attempt.code}")
        print(f"{fault.name}: {found[fault.name]}{by} [{attempt.seconds:.0f} s]", flush=True)
    if caught_by:
        sound = run_tests(copy, sorted(set(caught_by.values())), stops=False)
        if sound.code not in (PASSED, FAILED):
            raise RuntimeError(f"without a fault, pytest ended with {sound.code}:\n{sound.output[-3000:]}")
        for name, test in caught_by.items():
            if test in sound.failed:
                found[name] = "broken"
                print(f"{name}: broken: {test} fails without the fault, too")
    return found


@contextmanager
def copied() -> Iterator[Path]:
    """Yields a temporary copy of the project's files, and removes it."""
    with tempfile.TemporaryDirectory(prefix="planted_") as folder:
        for path in project_files():
            target = Path(folder) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, target)
        yield Path(folder)


def attempt_with(fault: Fault, copy: Path) -> Attempt:
    """Runs a fault's tests in a copy of the project with the fault, and takes it back."""
    path = copy / fault.file
    text = path.read_text(encoding="utf-8")
    path.write_text(fault.planted_in(text), encoding="utf-8")
    _forget_compiled(path)
    try:
        return run_tests(copy, shlex.split(fault.tests), stops=True)
    finally:
        path.write_text(text, encoding="utf-8")
        _forget_compiled(path)


def run_tests(copy: Path, arguments: Sequence[str], *, stops: bool) -> Attempt:
    """Runs pytest in a copy of the project; `stops` at the first failure."""
    sources = [str(folder) for folder in sorted(copy.glob("packages/*/src"))]
    # They come before the installed packages, which are those of the working tree.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    # Workers of pytest-xdist would change its exit code.
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(["-x"] if stops else []), *arguments]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            process.wait()
        finally:
            # Ranks and services that a failed test left behind, or everything after Ctrl-C.
            _kill_group(process.pid)
            process.wait()
        log.seek(0)
        output = log.read()
    return Attempt(process.returncode, tuple(_FAILURE.findall(output)), output, time.monotonic() - start)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _forget_compiled(path: Path) -> None:
    """Deletes the compiled forms of a module: Python takes one of the same second and size for current."""
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()


if __name__ == "__main__":
    sys.exit(main())
