"""Finds documents that were prepared earlier, for `skip_prepare_dataset`, without reading their source."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from xorl.data.errors import DataError
from xorl.data.formats import TokenizedFormat
from xorl.data.hashing import JSON, digest
from xorl.data.saved import SavedStore, is_saved_folder, saved_files
from xorl.data.sources import hash_files
from xorl.data.store import MANIFEST, FlatStore, StoreManifest

_PATH = "data.dataset_prepared_path"


def open_direct(path: Path, fmt: TokenizedFormat, split: str | None) -> FlatStore | SavedStore | None:
    """Opens `path` if it is itself a dataset: a published folder or one of datasets.save_to_disk. None if it is not.

    Raises DataError if it does not exist, or has a document longer than `fmt.limit`.
    """
    if not path.is_dir():
        raise DataError(
            f"{_PATH}: {path} is not a folder, but data.skip_prepare_dataset loads the prepared data from it"
        )
    if is_saved_folder(path):
        files = saved_files(path, split, option=_PATH)
        return SavedStore(files, fmt, digest("saved", hash_files(files), list(fmt.wanted)))
    if not (path / MANIFEST).is_file():
        return None
    store = FlatStore(path)
    if store.manifest.longest > fmt.limit:
        raise DataError(
            f"{_PATH}: {path} has a document of {store.manifest.longest} tokens, more than {fmt.limit_option} = "
            f"{fmt.limit}; raise {fmt.limit_option}, or set data.skip_prepare_dataset: false"
        )
    return store


def find_prepared(root: Path, request: Mapping[str, JSON], option: str) -> Path:
    """Returns the newest folder below `root` that was prepared for `request`.

    If there is none, raises a DataError that lists the existing ones.
    """
    found: list[tuple[Path, StoreManifest]] = []
    for path in sorted(root.glob(f"*/{MANIFEST}")):
        try:
            found.append((path.parent, StoreManifest.read(path.parent)))
        except DataError:
            # Written in another format version, so it cannot be loaded.
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
        f"{option}: {root} has no prepared dataset for {request['path']} with these options, and "
        "data.skip_prepare_dataset forbids preparing one. It has:\n" + ("\n".join(lines) or "  nothing")
    )
