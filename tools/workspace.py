"""The workspace: its root, its distributions, its files, and the path of uv.

Uses only the standard library, because it also runs in environments that contain a single distribution.
"""

import os
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Distribution:
    """A member of the workspace, as described by its pyproject.toml."""

    name: str
    version: str
    folder: Path
    dependencies: tuple[str, ...]
    modules: tuple[str, ...]

    @property
    def siblings(self) -> tuple[str, ...]:
        """The requirements on other distributions of the workspace."""
        return tuple(requirement for requirement in self.dependencies if requirement.startswith("xorl-"))


def distributions() -> dict[str, Distribution]:
    """Returns every distribution of the workspace by name."""
    found: dict[str, Distribution] = {}
    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        project, build = table["project"], table["tool"]["uv"]["build-backend"]
        found[project["name"]] = Distribution(
            name=project["name"],
            version=project["version"],
            folder=file.parent,
            dependencies=tuple(project["dependencies"]),
            modules=tuple(build["module-name"]),
        )
    return found


def project_files() -> list[Path]:
    """Returns the files that git tracks or would track, relative to the root."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [Path(name) for name in sorted(set(names)) if name and (ROOT / name).is_file()]


def uv() -> str:
    """Returns the uv that started this process, or the one on the path."""
    program = os.environ.get("UV") or shutil.which("uv")
    if program is None:
        raise RuntimeError("uv is not on the path: install it with `pip install uv`")
    return program


def locked_version(package: str) -> str:
    """Returns the version of a package in uv.lock."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    versions = [entry["version"] for entry in lock["package"] if entry["name"] == package]
    if len(versions) != 1:
        raise RuntimeError(f"expected one version of {package} in uv.lock, found {len(versions)}")
    return versions[0]
