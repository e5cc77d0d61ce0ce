"""A web server that speaks the few endpoints of the Hugging Face Hub which reading and uploading a dataset need.

`python hub_server.py` prints its address, then serves one private repository, org/name, from memory until it is ended.
"""

import base64
import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT, TOKEN = "a" * 40, "secret"
API, RESOLVE = "/api/datasets/org/name", "/datasets/org/name/resolve/"


class Hub(BaseHTTPRequestHandler):
    """The repository's files by path; `requests` counts what was asked of each endpoint."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes] = {}  # noqa: RUF012 - shared by all requests
    requests: dict[str, int] = {}  # noqa: RUF012

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a test that fails shows its own."""

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes) -> None:
        path = unquote(urlsplit(self.path).path)
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if path == "/requests":
            return self._json(self.requests)
        endpoint = "resolve" if path.startswith(RESOLVE) else path.removeprefix(API).strip("/").partition("/")[0]
        self.requests[endpoint] = self.requests.get(endpoint, 0) + 1
        if path == "/api/repos/create" and allowed:
            return self._json({"url": f"http://{self.headers['Host']}/datasets/org/name"})
        if not allowed or "org/name" not in path:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if path.startswith(RESOLVE):
            return self._file(path.removeprefix(RESOLVE).partition("/")[2])
        if endpoint == "tree":
            return self._json(self._tree(path.split("/", 7)[7:]))
        if endpoint == "preupload":
            asked = json.loads(body)["files"]
            return self._json(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]}
            )
        if endpoint == "commit":
            for entry in map(json.loads, body.splitlines()):
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            url = f"http://{self.headers['Host']}/datasets/org/name/commit/{COMMIT}"
            return self._json({"success": True, "commitOid": COMMIT, "commitUrl": url})
        siblings = [{"rfilename": name} for name in self.files]
        return self._json({"id": "org/name", "sha": COMMIT, "private": True, "tags": [], "siblings": siblings})

    def _tree(self, folder: list[str]) -> list[dict[str, object]]:
        """The entries of a folder, not of those below it."""
        prefix = f"{folder[0].strip('/')}/" if folder and folder[0] else ""
        found: dict[str, dict[str, object]] = {}
        for name, content in self.files.items():
            if not name.startswith(prefix):
                continue
            head, below, _ = name.removeprefix(prefix).partition("/")
            kind, size = ("directory", 0) if below else ("file", len(content))
            found[head] = {"type": kind, "path": prefix + head, "size": size, "oid": hashlib.sha1(content).hexdigest()}
        return list(found.values())

    def _file(self, name: str) -> None:
        if name not in self.files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        content, headers = self.files[name], {"X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        headers["ETag"] = f'"{hashlib.sha1(content).hexdigest()}"'
        wanted = self.headers.get("Range")
        if wanted is None:
            return self._send(200, content, headers)
        start, _, stop = wanted.removeprefix("bytes=").partition("-")
        part = content[int(start) : int(stop) + 1 if stop else None]
        headers["Content-Range"] = f"bytes {start}-{int(start) + len(part) - 1}/{len(content)}"
        return self._send(206, part, headers)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    sys.stdout.write(f"http://127.0.0.1:{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
