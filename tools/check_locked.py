"""Checks that uv.lock matches the pyproject files and works for every Python version that the project supports.

Wheels are only looked up in the package index: nothing is installed, and no other interpreter is needed.
"""

import subprocess
import tempfile
from pathlib import Path

from workspace import ROOT, uv

PYTHON_VERSIONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORM = "x86_64-manylinux_2_28"


def violations() -> list[str]:
    """Checks the lock, and that every locked package has a wheel for each Python version."""
    problems = _run("lock", "--check")
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        export = ("export", "--frozen", "--no-emit-workspace", "--no-hashes", "--quiet")
        problems += _run(*export, "--output-file", str(requirements))
        if problems:
            return problems
        for version in PYTHON_VERSIONS:
            wheels = ("pip", "install", "--dry-run", "--no-deps", "--only-binary", ":all:", "--target", folder)
            target = ("--python-version", version, "--python-platform", PLATFORM)
            problems += [f"Python {version}: {line}" for line in _run(*wheels, *target, "-r", str(requirements))]
    return problems


def _run(*args: str) -> list[str]:
    """Runs uv and returns its error output if it failed."""
    result = subprocess.run([uv(), *args], cwd=ROOT, text=True, capture_output=True, check=False)
    return [] if result.returncode == 0 else [result.stderr.strip()]
