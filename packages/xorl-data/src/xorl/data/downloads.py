"""The download cache: one copy of each file, keyed by URL, size and version. Interrupted downloads are resumed."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from xorl.data.errors import DataError, DataFailure
from xorl.data.hashing import HASH_BLOCK_BYTES, digest, hash_file
from xorl.data.lock import exclusive
from xorl.data.remote import RemoteFile, Storage, TransferError
from xorl.data.store import fsync, make_prepared_folder

logger = logging.getLogger(__name__)

# Consecutive attempts without progress; the wait between them doubles: 0.5 s, 1 s, 2 s, ...
ATTEMPTS = 6
FIRST_WAIT_S = 0.5
_REPORT_EVERY_S = 10.0
_PARALLEL = 8
_RECORD = "download.json"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Download:
    """A complete local copy of a remote file; `content` is its xxh3_128 at the time of the download."""

    path: Path
    url: str
    content: str


def fetch_all(files: Sequence[RemoteFile], storage: Storage, root: Path, option: str) -> list[Download]:
    """Downloads `files` into the folder `root` and returns their local copies in order; existing copies are reused.

    Raises DataError for a file that is not available, DataFailure if the network or the disk fails. After a failure,
    the next call resumes from the bytes already downloaded.
    """
    make_prepared_folder(root)
    with ThreadPoolExecutor(min(_PARALLEL, max(1, len(files)))) as pool:
        futures = [pool.submit(_fetch, file, storage, root, option) for file in files]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)


def with_retries(action: Callable[[], Result], url: str) -> Result:
    """Returns `action()`, retrying on TransferError. Raises DataFailure after ATTEMPTS attempts."""
    for attempt in range(ATTEMPTS):
        try:
            return action()
        except TransferError as error:
            if attempt == ATTEMPTS - 1:
                raise DataFailure(f"{error} ({ATTEMPTS} attempts)") from error
            _back_off(attempt, url, error)
    raise AssertionError("the last attempt returns or raises")


def _back_off(attempt: int, url: str, error: TransferError) -> None:
    wait_s = FIRST_WAIT_S * 2**attempt
    logger.warning("download url=%s phase=retry wait_s=%.1f reason=%s", url, wait_s, error)
    time.sleep(wait_s)


def _fetch(file: RemoteFile, storage: Storage, root: Path, option: str) -> Download:
    key = digest("download", file.url, file.size, file.version)
    folder = root / key
    if not (folder / _RECORD).is_file():
        with exclusive(root / f".{key}.lock", f"download url={file.url}"):
            if not (folder / _RECORD).is_file():
                _download(file, storage, folder, option)
    record = json.loads((folder / _RECORD).read_text())
    path = folder / record["name"]
    actual = path.stat().st_size if path.is_file() else None
    if actual != record["size"]:
        state = "is missing" if actual is None else f"has {actual} bytes"
        raise DataError(
            f"{path} {state}, but it was downloaded with {record['size']} bytes; remove {folder} to download it again"
        )
    return Download(path, file.url, record["xxh3_128"])


def _download(file: RemoteFile, storage: Storage, folder: Path, option: str) -> None:
    partial_folder = folder.with_name(f".{folder.name}.part")
    path = partial_folder / (file.name or "file")
    try:
        partial_folder.mkdir(exist_ok=True)
        _transfer(file, storage, path)
        size = path.stat().st_size
        _verify(file, storage, path, option)
        record = {"url": file.url, "name": path.name, "size": size, "xxh3_128": hash_file(path)}
        fsync(path)
        (partial_folder / _RECORD).write_text(json.dumps(record, indent=1) + "\n")
        fsync(partial_folder / _RECORD)
        fsync(partial_folder)
        partial_folder.rename(folder)
        fsync(folder.parent)
    except TransferError as error:
        raise DataFailure(
            f"{option}: the download failed: {error}; the partial file is kept, and the next start resumes it"
        ) from error
    except OSError as error:
        if (folder / _RECORD).is_file():  # another process took over and completed the download
            return
        raise DataFailure(
            f"{file.url} cannot be written to {partial_folder}: {error}; prepared_path sets the parent folder"
        ) from error


def _transfer(file: RemoteFile, storage: Storage, path: Path) -> None:
    """Appends the missing bytes to `path`, retrying until ATTEMPTS attempts in a row make no progress."""
    if file.version is None or (path.exists() and file.size is not None and path.stat().st_size > file.size):
        path.unlink(missing_ok=True)  # the partial file may belong to another version
    with path.open("ab") as output:
        failures = 0
        progress = _Progress(file, output.tell())
        while file.size is None or output.tell() < file.size:
            try:
                offset, blocks = storage.read(file, output.tell())
                if offset != output.tell():
                    output.seek(0)
                    output.truncate()
                for block in blocks:
                    output.write(block)
                    progress.update(output.tell())
                if file.size is None:
                    return
                if output.tell() < file.size:
                    raise TransferError(f"{file.url} ended after {output.tell()} of {file.size} bytes")
            except TransferError as error:
                output.flush()
                # Without range support each attempt starts over, so only bytes beyond the furthest one are progress.
                failures = 0 if output.tell() > progress.furthest else failures + 1
                progress.furthest = max(progress.furthest, output.tell())
                if failures == ATTEMPTS or file.size is None:
                    raise
                _back_off(max(0, failures - 1), file.url, error)


class _Progress:
    def __init__(self, file: RemoteFile, start: int) -> None:
        self._file = file
        self._start = start
        self._started = self._reported = time.monotonic()
        self.furthest = start

    def update(self, num_bytes: int) -> None:
        now = time.monotonic()
        if now - self._reported < _REPORT_EVERY_S:
            return
        self._reported = now
        rate = max(1.0, (num_bytes - self._start) / (now - self._started))
        total = self._file.size or 0
        line = "download url=%s mib=%d of=%d mib_per_s=%.1f left_s=%.0f"
        left = max(0, total - num_bytes) / rate
        logger.info(line, self._file.url, num_bytes >> 20, total >> 20, rate / 2**20, left)


def _verify(file: RemoteFile, storage: Storage, path: Path, option: str) -> None:
    size = path.stat().st_size
    problem = None
    if file.size is not None and size != file.size:
        problem = f"has {size} bytes after the download, the server reported {file.size}"
    elif file.md5 is not None and _md5(path) != file.md5:
        problem = f"has another MD5 than the server reported ({file.md5})"
    else:
        now = with_retries(partial(storage.stat, file.url), file.url)
        if now is None or (now.size, now.version) != (file.size, file.version):
            problem = "changed on the server during the download"
    if problem is not None:
        shutil.rmtree(path.parent)
        raise DataError(f"{option}: {file.url} {problem}; the copy was deleted, start again to download it")


def _md5(path: Path) -> str:
    hasher = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as source:
        while block := source.read(HASH_BLOCK_BYTES):
            hasher.update(block)
    return hasher.hexdigest()
