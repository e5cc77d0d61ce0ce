"""Finds the files that the README.md of a dataset folder declares (`configs`), as `datasets` would load them.

Clones of Hub datasets have such a README. Folders without one are read by their file names (sources.py).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from xorl.data.entry import DatasetEntry
from xorl.data.errors import DataError

# The files in which `datasets` looks for `configs`.
CARDS = ("README.md", ".huggingface.yaml")
_CONFIGS = re.compile(r"^\W*configs\W*:", re.MULTILINE)
_HEADER = re.compile(r"^\s*---[ \t]*\r?\n(.*?)^---", re.DOTALL | re.MULTILINE)


def declares_files(cards: Mapping[str, str]) -> bool:
    """Whether one of `cards`, the contents of existing files of CARDS, declares configs."""
    readme, standalone = (cards.get(name, "").removeprefix("\ufeff") for name in CARDS)
    header = _HEADER.match(readme)
    return any(_CONFIGS.search(text) for text in (header.group(1) if header else "", standalone))


def local_cards(folder: Path) -> dict[str, str]:
    """The contents of the files of CARDS in a folder."""
    files = [folder / name for name in CARDS]
    return {file.name: file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()}


def declared_files(folder: Path, entry: DatasetEntry, option: str) -> list[Path]:
    """The files of the entry's config and split in a folder that declares its files, in the order of `datasets`.

    Raises DataError if the README is invalid, or if it has no such config or split.
    """
    # Importing `datasets` takes seconds, and every rank imports this package.
    from xorl.data.hub import split_files  # noqa: PLC0415

    files = split_files(str(folder.resolve()), entry, option=option)
    strays = [file for file in files if "://" in file]
    if strays:
        raise DataError(
            f"{option}.path: {folder / CARDS[0]} names the remote file {strays[0]}; download it, or set path to its URL"
        )
    return [Path(file) for file in files]


def declared_names(names: Sequence[str], cards: Mapping[str, str], entry: DatasetEntry, option: str) -> list[str]:
    """Like `declared_files`, for a remote folder with these relative names: resolves them in a copy of empty files."""
    with tempfile.TemporaryDirectory(prefix="xorl-declared-") as temporary:
        root = Path(temporary).resolve()
        for name in names:
            if ".." not in PurePosixPath(name).parts:
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(cards.get(name, ""), encoding="utf-8")
        found = [file.relative_to(root).as_posix() for file in declared_files(root, entry, option)]
    return found
