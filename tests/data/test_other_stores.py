"""Google's and Azure's object stores, by their own clients against servers that speak as much of them as reading needs.

Their clients are extras that are not installed here: `uv run --with gcsfs --with adlfs pytest
tests/data/test_other_stores.py`; elsewhere these tests are skipped.
"""

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from xorl.data import DataError, DatasetEntry, PrepareOptions, prepare
from xorl.data.stream import StreamOptions, open_stream, reading, stream_bins

ROWS = [{"input_ids": list(range(i, i + 12))} for i in range(60)]
GOOGLE, MONDAY = "/storage/v1/b/corpus/o", "Mon, 01 Jan 2024 00:00:00 GMT"
DIALECTS = {"gs": "gcsfs", "abfs": "adlfs"}


class Store(BaseHTTPRequestHandler):
    """One bucket (or container), corpus, of objects by name, in both dialects."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes] = {}  # noqa: RUF012 - shared by all requests

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a test that fails shows its own."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path.startswith("/account"):
            return self._azure(unquote(url.path).removeprefix("/account").strip("/").partition("/")[2], query)
        path = url.path.removeprefix("/download")
        name = unquote(path.removeprefix(GOOGLE).strip("/"))
        if not path.startswith(GOOGLE) or (name and name not in self.objects):
            return self._send(404, b'{"error": {"code": 404, "message": "no such object"}}', {})
        if query.get("alt") == "media":
            return self._part(self.objects[name], {})
        names, folders = self._below(query)
        listing = {"items": [self._described(each) for each in names], "prefixes": folders}
        return self._send(200, json.dumps(self._described(name) if name else listing).encode(), {})

    def _described(self, name: str) -> dict[str, str]:
        digest = hashlib.md5(self.objects[name])
        found = {"name": name, "bucket": "corpus", "size": str(len(self.objects[name])), "etag": digest.hexdigest()}
        return {**found, "md5Hash": b64encode(digest.digest()).decode(), "updated": "2024-01-01T00:00:00.000Z"}

    def _azure(self, name: str, query: dict[str, str]) -> None:
        headers = {"x-ms-version": "2021-01-01", "Last-Modified": MONDAY, "Content-Type": "application/xml"}
        if query.get("comp") == "list":
            names, folders = self._below(query)
            blobs = "".join(
                f"<Blob><Name>{each}</Name><Properties><Last-Modified>{MONDAY}</Last-Modified>"
                f"<Etag>{self._described(each)['etag']}</Etag><Content-Length>{len(self.objects[each])}</Content-Length>"
                "<Content-Type>application/octet-stream</Content-Type><BlobType>BlockBlob</BlobType></Properties></Blob>"
                for each in names
            ) + "".join(f"<BlobPrefix><Name>{folder}</Name></BlobPrefix>" for folder in folders)
            page = f'<?xml version="1.0"?><EnumerationResults ContainerName="corpus"><Blobs>{blobs}</Blobs>'
            return self._send(200, f"{page}</EnumerationResults>".encode(), headers)
        if name not in self.objects:
            return self._send(404, b"", {**headers, "x-ms-error-code": "BlobNotFound"})
        known = {"ETag": f'"{self._described(name)["etag"]}"', "x-ms-blob-type": "BlockBlob"}
        return self._part(self.objects[name], {**headers, **known})

    def _below(self, query: dict[str, str]) -> tuple[list[str], list[str]]:
        """The objects of a prefix, and the folders in it where they are to be told apart."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        names = [name for name in sorted(self.objects) if name.startswith(prefix)]
        inner = [name for name in names if delimiter and delimiter in name.removeprefix(prefix)]
        folders = {prefix + name.removeprefix(prefix).partition("/")[0] + "/" for name in inner}
        return [name for name in names if name not in inner], sorted(folders)

    def _part(self, content: bytes, headers: dict[str, str]) -> None:
        wanted = self.headers.get("x-ms-range") or self.headers.get("Range")
        if wanted is None:
            return self._send(200, content, headers)
        start, _, stop = wanted.removeprefix("bytes=").partition("-")
        part = content[int(start) : int(stop) + 1 if stop else None]
        span = f"bytes {start}-{int(start) + len(part) - 1}/{len(content)}"
        return self._send(206, part, {**headers, "Content-Range": span})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Store]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
    account = f"DefaultEndpointsProtocol=http;AccountName=a;AccountKey=a2V5;BlobEndpoint={address}/account;"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", account)
    monkeypatch.setattr(reading, "_STORAGES", {})
    monkeypatch.setattr(Store, "objects", {})
    Thread(target=server.serve_forever, daemon=True).start()
    yield Store
    server.shutdown()


def lines(rows: list[dict[str, list[int]]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("scheme", DIALECTS)
def test_objects_are_read_and_streamed(store: type[Store], tmp_path: Path, scheme: str) -> None:
    # Catches names, versions and parts that one store's client gives otherwise than another's.
    pytest.importorskip(DIALECTS[scheme])
    store.objects |= {"web/train-0.jsonl": lines(ROWS[:20]), "web/train-1.jsonl": lines(ROWS[20:50])}
    store.objects["web/test-0.jsonl"] = lines(ROWS[50:])
    options = PrepareOptions(bin_len=64, prepared_path=tmp_path, shuffle_before_merging=False, shuffle_merged=False)

    def read(name: str, **entry: object) -> list[dict[str, list[int]]]:
        documents = prepare([DatasetEntry(f"{scheme}://corpus/{name}", **entry)], options)
        return [{"input_ids": documents.document(index)[0].tolist()} for index in range(len(documents))]

    assert read("web") == ROWS[:50]
    assert read("web", split="test") == ROWS[50:]
    assert read("web/t*-0.jsonl") == ROWS[50:] + ROWS[:20]
    with pytest.raises(DataError, match="does not exist"):
        read("web/none.jsonl")
    stream = open_stream([DatasetEntry(f"{scheme}://corpus/web")], StreamOptions(64), index_path=tmp_path / "index")
    bins = islice(stream_bins(stream, first=0, stride=1), 15)
    assert {int(document.input_ids[0]) for member in bins for document in member.documents} == set(range(50))
    store.objects["web/train-0.jsonl"] = lines(ROWS[5:10])
    assert read("web/train-0.jsonl") == ROWS[5:10]
    with pytest.raises(DataError, match="changed while it was streamed"):
        list(islice(stream_bins(stream, first=0, stride=1), 50))
