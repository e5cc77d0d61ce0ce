"""Lists remote files and reads them from an offset: object stores through fsspec, web servers through urllib.

downloads.py is the cache. Web servers are not read through fsspec: if a server does not support ranges, fsspec silently
returns the whole file for the requested range, which would corrupt a resumed download.
"""

from __future__ import annotations

import base64
import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import fsspec

from xorl.data.errors import DataError

# The extra of xorl-data that each scheme needs; None: no extra.
SCHEMES: dict[str, str | None] = {
    "s3": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "abfs": "azure",
    "abfss": "azure",
    "hf": None,
    "https": None,
    "http": None,
}
TIMEOUT_S = 60.0
_READ_BYTES = 8 << 20
_FORBIDDEN = {401, 403}
_MISSING = {404, 410}
# Errors that a retry cannot fix.
_PERMANENT = {400, 405, 407, 411, 414, 451}


class TransferError(OSError):
    """A temporary error: a lost connection, a server error, a rate limit."""


@dataclass(frozen=True)
class RemoteFile:
    """A file as described by its server. `version` (ETag or time) changes with the content; `md5` is hexadecimal."""

    url: str
    size: int | None
    version: str | None
    md5: str | None = None

    @property
    def name(self) -> str:
        """The last component of the path, without the query of a web URL."""
        scheme, _, rest = self.url.partition("://")
        path = unquote(urlsplit(self.url).path) if scheme in ("http", "https") else rest
        return path.rstrip("/").rpartition("/")[2]


class Storage(Protocol):
    """Access to URLs of one scheme. Methods raise TransferError for temporary errors and DataError for all others."""

    def stat(self, url: str) -> RemoteFile | None:
        """The file at `url`; None if there is no file, but possibly a folder."""
        ...

    def find(self, url: str) -> list[RemoteFile]:
        """The files that match a pattern, or all files below a folder, sorted by name."""
        ...

    def read(self, file: RemoteFile, start: int, stop: int | None = None) -> tuple[int, Iterator[bytes]]:
        """The bytes from `start` to `stop` and the offset of the first one: 0 if the server does not support ranges."""
        ...


def is_url(path: str) -> bool:
    """Whether a path is a URL."""
    return "://" in path


def storage_of(url: str, option: str, token: str | bool | None = None) -> Storage:
    """Returns the storage for `url`; `token` is for the Hub (hf://).

    Raises DataError for an unknown scheme, or if the extra for the scheme is not installed.
    """
    scheme = url.split("://", 1)[0].lower()
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise DataError(f"{option}: {url}: {scheme}:// is not one of {known}")
    if scheme in ("http", "https"):
        return HttpStorage(option)
    try:
        system, _ = fsspec.url_to_fs(url, **({"token": token} if scheme == "hf" else {}))
    except ImportError as error:
        raise DataError(
            f"{option}: {url} needs the extra {SCHEMES[scheme]} of xorl-data, which is not installed ({error}); run "
            f"pip install 'xorl-data[{SCHEMES[scheme]}]'"
        ) from error
    return FsspecStorage(system, scheme, option)


class FsspecStorage:
    """An object store. Its client library reads credentials and endpoints from their usual files and variables."""

    def __init__(self, system: Any, scheme: str, option: str) -> None:  # noqa: ANN401 - fsspec has no types
        self._system = system
        self._scheme = scheme
        self._option = option

    def stat(self, url: str) -> RemoteFile | None:
        try:
            self._system.invalidate_cache()
            info = self._system.info(self._system._strip_protocol(url))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._translated(url, error) from error
        return self._remote_file(url, info) if info.get("type") == "file" else None

    def find(self, url: str) -> list[RemoteFile]:
        path = self._system._strip_protocol(url)
        try:
            self._system.invalidate_cache()
            if any(character in path for character in "*?["):
                found = self._system.glob(path, detail=True)
            else:
                found = self._system.find(path, detail=True)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._translated(url, error) from error
        files = {name: info for name, info in found.items() if info.get("type") == "file" and not name.endswith("/")}
        return [self._remote_file(self._url(name), files[name]) for name in sorted(files)]

    def read(self, file: RemoteFile, start: int, stop: int | None = None) -> tuple[int, Iterator[bytes]]:
        end = file.size if stop is None else stop
        if end is None:
            raise DataError(f"{self._option}: the store does not report the size of {file.url}; use a copy")
        return start, self._blocks(file.url, start, end)

    def _blocks(self, url: str, start: int, end: int) -> Iterator[bytes]:
        path = self._system._strip_protocol(url)
        while start < end:
            stop = min(start + _READ_BYTES, end)
            try:
                block = self._system.cat_file(path, start=start, end=stop)
            except Exception as error:
                raise self._translated(url, error) from error
            if not block:
                raise TransferError(f"{url} ended at byte {start} of {end}")
            yield block
            start += len(block)

    def _url(self, name: str) -> str:
        return name if is_url(name) else f"{self._scheme}://{name}"

    def _remote_file(self, url: str, info: dict[str, Any]) -> RemoteFile:
        keys = ("ETag", "etag", "blob_id", "LastModified", "last_modified", "updated", "mtime")
        version = next((str(info[key]) for key in keys if info.get(key)), None)
        md5 = info.get("md5Hash") or (info.get("content_settings") or {}).get("content_md5")
        return RemoteFile(url, info.get("size"), version, _md5_hex(md5))

    def _translated(self, url: str, error: Exception) -> Exception:
        if isinstance(error, FileNotFoundError):
            return DataError(f"{self._option}: {url} does not exist")
        if isinstance(error, PermissionError) or "credential" in f"{type(error).__name__} {error}".lower():
            return DataError(
                f"{self._option}: access to {url} is denied: {error}; set up the credentials for {self._scheme}:// in "
                "the environment variables or files of its usual tools"
            )
        return TransferError(f"{url}: {type(error).__name__}: {error}")


class HttpStorage:
    """A web server."""

    def __init__(self, option: str) -> None:
        self._option = option

    def stat(self, url: str) -> RemoteFile | None:
        try:
            with self._open(url, {}, method="HEAD") as response:
                return _from_headers(url, response.headers, response.headers.get("Content-Length"))
        except _HttpStatus as status:
            if status.code in _MISSING:
                return None
            if status.code not in {403, 405, 501}:
                raise self._translated(url, status) from status
        # Some servers, and URLs signed for GET only, reject HEAD. Requesting a single byte returns the same headers.
        try:
            with self._open(url, {"Range": "bytes=0-0"}) as response:
                span = response.headers.get("Content-Range", "")
                size = span.rpartition("/")[2] if response.status == 206 else response.headers.get("Content-Length")
                return _from_headers(url, response.headers, size)
        except _HttpStatus as status:
            if status.code in _MISSING:
                return None
            raise self._translated(url, status) from status

    def find(self, url: str) -> list[RemoteFile]:
        raise DataError(
            f"{self._option}: {url} is not a file, and a web server cannot list a folder; list the files one by one in "
            "data_files"
        )

    def read(self, file: RemoteFile, start: int, stop: int | None = None) -> tuple[int, Iterator[bytes]]:
        headers = {}
        if start or stop is not None:
            headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        try:
            response = self._open(file.url, headers)
        except _HttpStatus as status:
            raise self._translated(file.url, status) from status
        version = _version(response.headers)
        if file.version is not None and version is not None and version != file.version:
            response.close()
            raise DataError(f"{self._option}: {file.url} changed on the server during the run; start again")
        offset = start if response.status == 206 else 0
        return offset, self._blocks(file.url, response)

    def _blocks(self, url: str, response: http.client.HTTPResponse) -> Iterator[bytes]:
        with response:
            while True:
                try:
                    block = response.read1(_READ_BYTES)
                except (OSError, http.client.HTTPException) as error:
                    raise TransferError(f"{url}: {type(error).__name__}: {error}") from error
                if not block:
                    return
                yield block

    def _open(self, url: str, headers: dict[str, str], method: str = "GET") -> http.client.HTTPResponse:
        # With compression in transit, ranges would refer to other bytes.
        all_headers = {"Accept-Encoding": "identity", "User-Agent": "xorl-data", **headers}
        request = urllib.request.Request(url, headers=all_headers, method=method)
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                raise _HttpStatus(error.code, str(error.reason)) from error
        except (OSError, http.client.HTTPException) as error:
            raise TransferError(f"{url}: {type(error).__name__}: {error}") from error

    def _translated(self, url: str, status: _HttpStatus) -> Exception:
        if status.code in _MISSING:
            return DataError(f"{self._option}: {url} does not exist ({status})")
        if status.code in _FORBIDDEN:
            return DataError(f"{self._option}: access to {url} is denied ({status})")
        if status.code in _PERMANENT:
            return DataError(f"{self._option}: {url} cannot be read ({status})")
        return TransferError(f"{url}: {status}")


class _HttpStatus(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code} {reason}")
        self.code = code


def _version(headers: http.client.HTTPMessage) -> str | None:
    return headers.get("ETag") or headers.get("Last-Modified")


def _from_headers(url: str, headers: http.client.HTTPMessage, size: str | None) -> RemoteFile:
    known = int(size) if size is not None and size.isdigit() else None
    return RemoteFile(url, known, _version(headers), _md5_hex(headers.get("Content-MD5")))


def _md5_hex(value: str | bytes | None) -> str | None:
    """Converts an MD5 from base64 (or bytes) to hex; None for anything else."""
    with suppress(ValueError, TypeError):
        raw = base64.b64decode(value, validate=True) if isinstance(value, str) else bytes(value or b"")
        return raw.hex() if len(raw) == 16 else None
    return None
