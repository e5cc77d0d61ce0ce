"""environment(): the machine and the package versions that a measurement was taken with."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch.cuda import nccl

DISTRIBUTIONS = ("torch", "triton", "transformers", "liger-kernel", "flash-attn", "flash-attn-3", "flash-attn-4")


def environment() -> dict[str, str | int | None]:
    """Name -> value, None if unknown. `commit` is that of the git checkout xorl runs from, if there is one."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "gpus": ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or None,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())) if names else None,
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: _version(name) for name in DISTRIBUTIONS},
        "xorl": _version("xorl-cli"),
        "commit": _commit(),
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", file.read_text()) if file.exists() else None
    return found.group() if found else None


def _commit() -> str | None:
    """The short commit hash, followed by + if tracked files were modified."""
    folder = Path(__file__).parent
    try:
        commit = _git(folder, "rev-parse", "--short=10", "HEAD")
        return commit + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
