"""Runs the conformance tests of the service against several releases of tinker's SDK.

    uv run tools/check_clients.py                        # the releases in the table of docs/server.md
    uv run tools/check_clients.py --releases 0.38.0      # others

Each release is installed from the package index into a temporary folder, in front of the environment's own one, with
the environment's versions of what it needs. Prints the table of docs/server.md: what a release lacks and what was seen
to work. Exits with 1 if the tests of any release fail.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from workspace import ROOT, uv

RELEASES = ("0.30.4", "0.33.1", "0.36.0", "0.38.0")
TESTS = "tests/e2e/server/test_conformance.py"
# Calls that the tests leave out where a release does not have them, by class.
OPTIONAL = {
    "rest_client.RestClient": ("get_server_capabilities", "search_sessions", "copy_weights"),
    "sampling_client.SamplingClient": ("get_sampler_handle",),
}
TIMEOUT_S = 600


def main() -> int:
    """Test each release, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--releases", nargs="+", default=RELEASES, metavar="RELEASE")
    releases: Sequence[str] = parser.parse_args().releases
    print("| tinker | conformance tests | calls that it lacks |\n|---|---|---|")
    failed = False
    for release in releases:
        with tempfile.TemporaryDirectory() as folder:
            install = (uv(), "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", folder)
            subprocess.run([*install, f"tinker=={release}"], check=True)
            outcome, is_failed = _run_tests(Path(folder))
            failed |= is_failed
            print(f"| {release} | {outcome} | {', '.join(_lacking(Path(folder))) or 'none'} |", flush=True)
    return int(failed)


def _run_tests(folder: Path) -> tuple[str, bool]:
    """The outcome of the tests in words, and whether any failed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "--import-mode=importlib",
    ]
    ran = subprocess.run(
        [*command, TESTS], cwd=ROOT, env=_with(folder), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    closing = re.search(r"(\d+ (?:passed|failed|skipped|error).*?) in ", ran.stdout)
    if ran.returncode:
        print(ran.stdout[-4000:], ran.stderr[-2000:], file=sys.stderr)
    return closing[1] if closing else f"exit code {ran.returncode}", ran.returncode != 0


def _lacking(folder: Path) -> list[str]:
    """The optional calls that a release does not have."""
    lines = ["import importlib"]
    for path, calls in OPTIONAL.items():
        module, _, name = path.partition(".")
        lines.append(f"found = getattr(importlib.import_module('tinker.lib.public_interfaces.{module}'), '{name}')")
        lines.append(f"print(*(call for call in {calls!r} if not hasattr(found, call)))")
    command = [sys.executable, "-c", "\n".join(lines)]
    ran = subprocess.run(command, env=_with(folder), capture_output=True, text=True, check=True)
    return ran.stdout.split()


def _with(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


if __name__ == "__main__":
    sys.exit(main())
