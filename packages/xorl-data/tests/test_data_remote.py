"""Web addresses: downloads that survive a bad server, go on where they stopped, and are never a mixture of versions."""

import hashlib
import json
import lzma
import re
import threading
from dataclasses import dataclass, field
from dataclasses import replace as changed
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from data_files import make_rows, rows_of
from xorl.data import DataError, DataFailure, DatasetEntry, downloads, prepare
from xorl.data.remote import SCHEMES, storage_of


@dataclass
class Web:
    """A web server over a dict of files, whose faults a test turns on."""

    files: dict[str, bytes] = field(default_factory=dict)
    drop_after: int | None = None  # bytes of an answer after which the connection is lost
    num_failures: int = 0  # answers of 500 still to give
    ranges: bool = True
    head: bool = True
    versions: bool = True
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def content_asked(self):
        return [range_ for method, _, range_ in self.asked if method == "GET"]


@pytest.fixture
def web(monkeypatch):
    state = Web()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            state.asked.append((self.command, self.path, self.headers["Range"]))
            content = state.files.get(self.path.partition("?")[0])
            if state.num_failures:
                state.num_failures -= 1
                return self._answer(500, b"")
            if self.command == "HEAD" and not state.head:
                return self._answer(405, b"")
            if content is None:
                return self._answer(404, b"")
            span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
            if span and state.ranges:
                start, stop = int(span[1]), int(span[2] or len(content) - 1) + 1
                return self._answer(206, content[start:stop], content, f"bytes {start}-{stop - 1}/{len(content)}")
            return self._answer(200, content, content)

        do_HEAD = do_GET

        def _answer(self, code, body, content=None, span=None):
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            if span:
                self.send_header("Content-Range", span)
            if content is not None and state.versions:
                self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.end_headers()
            if self.command == "HEAD":
                return
            if state.drop_after is not None and len(body) > state.drop_after:
                self.wfile.write(body[: state.drop_after])
                self.close_connection = True
                return
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(downloads, "FIRST_WAIT_S", 0.001)
    yield state
    server.shutdown()
    server.server_close()


@pytest.fixture
def corpus(web):
    """Rows, the file of them on the server, and an entry of it."""
    rows = make_rows(200)
    web.files["/rows.jsonl"] = content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return rows, content, DatasetEntry(f"{web.url}/rows.jsonl")


def test_a_file_is_downloaded_once_and_again_when_it_changed(web, corpus, options):
    """Catches a download for every start, and a copy that is kept when the file on the server is another one."""
    rows, content, entry = corpus
    entry = DatasetEntry(f"{entry.path}?key=1")
    assert rows_of(prepare([entry], options)) == rows
    assert web.content_asked() == [None]
    assert rows_of(prepare([entry], options)) == rows
    assert web.content_asked() == [None]
    web.files["/rows.jsonl"] = b"".join(content.splitlines(keepends=True)[:50])
    assert rows_of(prepare([entry], options)) == rows[:50]


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("head", [True, False])
def test_a_server_in_trouble_is_asked_again(web, corpus, options, ranges, head):
    """Catches a run that one answer of 500 ends, and a download that begins anew where it could go on."""
    rows, _, entry = corpus
    web.num_failures, web.ranges, web.head = 3, ranges, head
    assert rows_of(prepare([entry], options)) == rows
    assert list((options.prepared_path / "downloads").glob(".*")) == []


def test_a_lost_connection_is_continued_from_its_last_byte(web, corpus, options):
    """Catches bytes that are lost, doubled or loaded again where a connection broke."""
    rows, content, entry = corpus
    web.drop_after = len(content) // 5
    assert rows_of(prepare([entry], options)) == rows
    starts = [int(span.split("=")[1].split("-")[0]) if span else 0 for span in web.content_asked()]
    assert starts == sorted(set(starts))
    assert len(starts) >= 5


def test_what_a_dead_server_left_is_continued_by_the_next_start(web, corpus, options):
    """Catches a start that throws away what the last one loaded, and one that gives up silently."""
    rows, content, entry = corpus
    half = len(content) // 2
    web.drop_after, web.ranges = half, False
    with pytest.raises(DataFailure, match=r"rows.jsonl ended after .* bytes; the partial file is kept"):
        prepare([entry], options)
    web.drop_after, web.ranges = None, True
    web.asked.clear()
    assert rows_of(prepare([entry], options)) == rows
    assert web.content_asked() == [f"bytes={half}-"]


def test_a_part_of_an_old_version_is_not_continued(web, corpus, options):
    """Catches a file whose first half is yesterday's."""
    rows, content, entry = corpus
    web.drop_after, web.ranges = len(content) // 2, False
    with pytest.raises(DataFailure):
        prepare([entry], options)
    web.files["/rows.jsonl"] = b"".join(reversed(content.splitlines(keepends=True)))
    web.drop_after, web.ranges = None, True
    assert rows_of(prepare([entry], options)) == rows[::-1]


def test_a_server_that_names_no_versions_serves_too(web, corpus, options):
    """Catches a plain server that cannot be read at all."""
    rows, _, entry = corpus
    web.versions = False
    assert rows_of(prepare([entry], options)) == rows


def test_data_files_are_below_the_address_or_stand_for_themselves(web, corpus, options):
    """Catches a list of files read in another order, and compressed ones read as they are."""
    rows, content, _ = corpus
    lines = content.splitlines(keepends=True)
    web.files = {"/a/1.jsonl": b"".join(lines[:80]), "/b/2.jsonl.xz": lzma.compress(b"".join(lines[80:]))}
    entry = DatasetEntry(f"{web.url}/a", data_files=["1.jsonl", f"{web.url}/b/2.jsonl.xz"], ds_type="json")
    assert rows_of(prepare([entry], options)) == rows


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"path": "{url}/none.jsonl"}, r"entries\[0\].path: .*none.jsonl is not a file, and a web server cannot"),
        ({"path": "{url}", "data_files": "none.jsonl", "ds_type": "json"}, r"data_files: .*none.jsonl is not a file"),
        ({"path": "{url}/rows.jsonl", "revision": "v1"}, r"entries\[0\].revision: 'v1' applies only to Hub"),
        ({"path": "{url}/rows.jsonl", "split": "test"}, r"entries\[0\].split"),
        ({"path": "ftp://host/rows.jsonl"}, r"ftp:// is not one of s3://, gs://"),
        ({"path": ".", "data_files": ["{url}/rows.jsonl", "b.json"], "ds_type": "json"}, r"must be URLs of one scheme"),
    ],
)
@pytest.mark.usefixtures("corpus")
def test_an_address_that_cannot_be_read_names_the_option(web, options, entry, words):
    """Catches a bad address that is told by a traceback of another library."""
    values = {
        key: [item.format(url=web.url) for item in value] if isinstance(value, list) else value.format(url=web.url)
        for key, value in entry.items()
    }
    with pytest.raises(DataError, match=words):
        prepare([DatasetEntry(**values)], options)


def test_a_copy_that_was_edited_is_noticed(corpus, options):
    """Catches training on a damaged copy of a file that is whole on its server."""
    _, content, entry = corpus
    prepare([entry], options)
    copy = next((options.prepared_path / "downloads").glob("*/rows.jsonl"))
    copy.write_bytes(content.replace(b"1", b"2"))
    with pytest.raises(DataError, match=r"was modified after its download from http"):
        prepare([entry], options)
    copy.write_bytes(b"")
    with pytest.raises(DataError, match="has 0 bytes, but it was downloaded with"):
        prepare([entry], changed(options, num_proc=2))


@pytest.mark.parametrize("scheme", ["s3", "gs", "abfs"])
def test_a_missing_extra_is_named(scheme, monkeypatch):
    """Catches an ImportError of fsspec in place of what to install."""
    extra = SCHEMES[scheme]

    def missing(_url, **_):
        raise ImportError("no such module")

    monkeypatch.setattr("fsspec.url_to_fs", missing)
    with pytest.raises(DataError, match=rf"data.x: {scheme}://b/a needs the extra {extra} .*'xorl-data\[{extra}\]'"):
        storage_of(f"{scheme}://b/a", "data.x")
