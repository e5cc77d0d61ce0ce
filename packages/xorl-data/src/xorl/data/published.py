"""Finds earlier prepared documents, for `skip_prepare_dataset`: nothing here reads the samples' source."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from xorl.data.errors import DataError
from xorl.data.formats import TokenizedFormat
from xorl.data.saved import SavedStore, is_saved_folder, saved_files
from xorl.data.shuffle import JSON, digest
from xorl.data.sources import hash_files
from xorl.data.store import MANIFEST, FlatStore, Manifest

_PATH = "data.dataset_prepared_path"


def open_direct(path: Path, form: TokenizedFormat, split: str | None) -> FlatStore | SavedStore | None:
    """The dataset at `path` itself: a published folder or one of datasets.save_to_disk. None if it is neither.

    DataError if it does not exist, or holds a document longer than `form.limit`.
    """
    if not path.is_dir():
        raise DataError(f"{_PATH}: {path} is not a folder, and data.skip_prepare_dataset asks to load from it")
    if is_saved_folder(path):
        files = saved_files(path, split, option=_PATH)
        return SavedStore(files, form, digest("saved", hash_files(files), list(form.wanted)))
    if not (path / MANIFEST).is_file():
        return None
    store = FlatStore(path)
    if store.manifest.longest > form.limit:
        raise DataError(
            f"{_PATH}: {path} holds a document of {store.manifest.longest} tokens, more than {form.limit_option} = "
            f"{form.limit}; raise it, or set data.skip_prepare_dataset: false"
        )
    return store


def find_prepared(root: Path, request: Mapping[str, JSON], option: str) -> Path:
    """The newest published folder below `root` prepared for `request`; else a DataError lists what is there."""
    found: list[tuple[Path, Manifest]] = []
    for path in sorted(root.glob(f"*/{MANIFEST}")):
        try:
            found.append((path.parent, Manifest.read(path.parent)))
        except DataError:
            # Of another format version: it cannot be loaded.
            continue
    matching = [(manifest.created, folder) for folder, manifest in found if manifest.request == request]
    if matching:
        return max(matching)[1]
    lines = [
        f"  {folder.name} of {time.strftime('%Y-%m-%d %H:%M', time.localtime(manifest.created))}: {manifest.name}, but "
        + ", ".join(f"{k}={v}" for k, v in manifest.request.items() if v != request.get(k))
        for folder, manifest in found
    ]
    raise DataError(
        f"{option}: {root} holds nothing prepared for {request['path']} with these options, and "
        "data.skip_prepare_dataset forbids preparing it. It holds:\n" + ("\n".join(lines) or "  nothing")
    )
