"""Checks that the six wheels and sdists build and are fit to publish: `uv run tools/check_wheels.py`.

twine checks their metadata. The wheels are installed in a temporary environment that borrows third-party packages from
this one.
"""

import email
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

from workspace import ROOT, Distribution, distributions, uv

IMPORT_ALL = """
import importlib, sys
prefix, *modules = sys.argv[1:]
for name in modules:
    file = importlib.import_module(name).__file__ or ""
    if not file.startswith(prefix):
        sys.exit(f"{name} was imported from {file}, not from its wheel")
"""


def main() -> int:
    """Builds, inspects and imports the wheels, prints the problems and returns the exit code."""
    members = distributions()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        subprocess.run([uv(), "build", "--all-packages", "--quiet", "--out-dir", name], cwd=ROOT, check=True)
        wheels = sorted(folder.glob("*.whl"))
        problems = _wrong_set(wheels, members)
        for member in () if problems else members.values():
            problems += _wrong_content(_wheel_of(member, wheels), member, members)
        problems += _wrong_metadata(folder)
        problems = problems or _wrong_install(folder, wheels, members)
    print(
        "\n".join(problems)
        or f"ok   {len(members)} wheels and sdists of version {_version(members)} build, fit together and import"
    )
    return 1 if problems else 0


def _version(members: dict[str, Distribution]) -> str:
    """Returns the version of all members, or a list of them if they differ."""
    return ", ".join(sorted({member.version for member in members.values()}))


def _wheel_of(member: Distribution, wheels: list[Path]) -> Path:
    """Returns the wheel of a member."""
    return next(wheel for wheel in wheels if wheel.name.startswith(member.name.replace("-", "_") + "-"))


def _wrong_metadata(folder: Path) -> list[str]:
    """Returns what an index would refuse or show badly."""
    files = sorted(map(str, [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]))
    check = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *files]
    result = subprocess.run(check, text=True, capture_output=True, check=False)
    return [(result.stdout + result.stderr).strip()] if result.returncode else []


def _wrong_set(wheels: list[Path], members: dict[str, Distribution]) -> list[str]:
    """Compares the built wheels with the members."""
    built = {wheel.name.split("-")[0].replace("_", "-") for wheel in wheels}
    return [f"built {sorted(built)}, expected {sorted(members)}"] if built != set(members) else []


def _wrong_content(wheel: Path, member: Distribution, members: dict[str, Distribution]) -> list[str]:
    """Compares a wheel with the sources, and its requirements with the versions of the members."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        headers = email.message_from_bytes(archive.read(metadata))
    source = member.folder / "src"
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."]
    tracked = subprocess.run(listing, cwd=source, check=True, capture_output=True, text=True).stdout.split("\0")
    problems = [f"{wheel.name}: lacks {name}" for name in tracked if name and name not in names]
    problems += [f"{wheel.name}: contains xorl/__init__.py"] if "xorl/__init__.py" in names else []
    for module in member.modules:
        marker = f"{module.replace('.', '/')}/py.typed"
        problems += [] if marker in names else [f"{wheel.name}: lacks {marker}"]
    for requirement in map(Requirement, headers.get_all("Requires-Dist", [])):
        sibling = members.get(requirement.name)
        if sibling is not None and sibling.version not in requirement.specifier:
            problems.append(f"{wheel.name}: requires {requirement}, but {sibling.name} is {sibling.version}")
        if sibling is not None and any(part.operator == "==" for part in requirement.specifier):
            problems.append(f"{wheel.name}: requires {requirement}; want a range, so that each can be released alone")
    return problems


def _wrong_install(folder: Path, wheels: list[Path], members: dict[str, Distribution]) -> list[str]:
    """Installs all wheels, imports all of xorl from them and runs `xorl --help`."""
    environment = folder / "environment"
    python = environment / "bin" / "python"
    steps = [
        [uv(), "venv", "--quiet", "--python", sys.executable, str(environment)],
        [uv(), "pip", "install", "--quiet", "--no-deps", "--no-index", "--python", str(python), *map(str, wheels)],
    ]
    for step in steps:
        subprocess.run(step, cwd=folder, check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    # A .pth file adds the third-party packages; .pth files in that folder, such as the editable xorl's, are ignored.
    (packages / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    modules = [module for member in members.values() for module in member.modules]
    runs = [[str(python), "-c", IMPORT_ALL, str(packages), *modules], [str(environment / "bin" / "xorl"), "--help"]]
    results = [subprocess.run(run, cwd=folder, text=True, capture_output=True, check=False) for run in runs]
    return [(result.stdout + result.stderr).strip() for result in results if result.returncode]


if __name__ == "__main__":
    sys.exit(main())
