"""Who may call the API: the token, on every path and with every spelling, and pages of other origins."""

import re
import socket
import time

import httpx
import pytest

from answering_orchestrator import asked_at, served
from xorl.server.api import ApiSettings
from xorl.server.api.app import ROUTERS

TOKEN = "tml-the-right-token-of-it"
RIGHT = [
    {"x-api-key": TOKEN},
    {"authorization": f"Bearer {TOKEN}"},
    {"authorization": f"bearer {TOKEN}"},
    {"authorization": f"BEARER  {TOKEN}"},
]
WRONG = [
    {},
    {"x-api-key": ""},
    {"x-api-key": TOKEN[:-1]},
    {"x-api-key": TOKEN + "x"},
    {"x-api-key": TOKEN.upper()},
    {"x-api-key": "x" * 10_000},
    {"x-api-key": "\xff\xfe"},
    {"authorization": f"Basic {TOKEN}"},
    {"authorization": TOKEN},
    {"authorization": "Bearer"},
    {"cookie": f"x-api-key={TOKEN}"},
]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    with asked_at(tmp_path_factory.mktemp("outputs"), token=TOKEN) as service:
        yield service


def paths():
    """(method, path) of every route, ids filled in."""
    routes = [route for router in ROUTERS for route in router.routes]
    return [(next(iter(route.methods)), re.sub(r"[{}]|:path", "", route.path)) for route in routes]


def test_no_path_answers_without_the_token(guarded):
    """Catches a route that is reached around the gate, and one that tells who asks without it anything."""
    client, orchestrator = guarded
    assert len(paths()) > 35
    for method, path in paths():
        answer = client.request(method, path, content=b"{}")
        if path in ("/", "/health", "/api/v1/healthz"):
            assert answer.status_code == 200
            continue
        # A URL with a signature has none here.
        assert answer.status_code == (422 if path.startswith("/files/") else 401), path
        assert TOKEN not in answer.text
    for odd in (
        "//api/v1/sessions",
        "/API/V1/sessions",
        "/api/v1/../v1/sessions",
        "/health/../status.json",
        "/nothing",
    ):
        assert client.get(odd).status_code == 401, odd
    assert client.get("/", headers={"x-api-key": "wrong"}).text.count("tiny") == 0
    assert orchestrator.submits == []


@pytest.mark.parametrize("headers", WRONG)
def test_wrong_tokens_do_not_get_in(guarded, headers):
    """Catches a comparison that is lenient, or dies of what it is given."""
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    assert guarded[0].get("/api/v1/sessions", headers=encoded).status_code == 401


@pytest.mark.parametrize("headers", RIGHT)
def test_the_right_token_gets_in_by_both_headers(guarded, headers):
    """Catches a gate that one of the clients cannot pass, for example one that writes the scheme in lower case."""
    assert guarded[0].get("/api/v1/sessions", headers=headers).status_code == 200


def test_urls_of_files_need_their_signature_alone(guarded):
    """Catches URLs that a download tool, which has no token, cannot fetch, and files that anybody can."""
    client, _ = guarded
    key = {"x-api-key": TOKEN}
    client.post("/api/v1/save_weights", json={"model_id": "m", "path": "one"}, headers=key)
    found = client.get("/api/v1/training_runs/m/checkpoints/weights/one/external_weights_urls", headers=key).json()
    (url,) = found["urls"].values()
    assert client.get(url).content == b"weights"
    unsigned = url.partition("?")[0]
    assert client.get(unsigned).status_code == 422
    assert client.get(f"{unsigned}?expires=9999999999&signature={TOKEN}").status_code == 403
    for odd in ("/files", "//files/m/weights/one/x", "/files/../status.json"):
        assert client.get(f"{odd}?expires=9999999999&signature=x").status_code in (401, 404), odd


@pytest.mark.parametrize("path", ["telemetry", "retrieve_future", "create_session"])
def test_calls_without_data_take_no_long_bodies(guarded, path):
    """Catches numbers of JSON that take many times their bytes while everybody waits."""
    body = b"[" + b"0," * 2**22 + b"0]"
    assert guarded[0].post(f"/api/v1/{path}", content=body, headers={"x-api-key": TOKEN}).status_code == 413


def test_a_request_that_is_none_ends_its_connection_alone(guarded):
    """Catches a header without an end that fills the memory, and a server that dies of no HTTP at all."""
    client, _ = guarded
    host, port = client.base_url.host, client.base_url.port
    for rubbish in (b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000, b"\x80\x04\x95\r\n\r\n", b"POST / HTTP/9\r\n\r\n"):
        with socket.create_connection((host, port), timeout=10) as connection:
            connection.sendall(rubbish)
            answer = connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 4") or answer == b""
    assert client.get("/health").status_code == 200


def connect(url):
    address = httpx.URL(url)
    return socket.create_connection((address.host, address.port), timeout=10)


@pytest.mark.parametrize(
    ("version", "headers", "status"),
    [
        ("1.1", "Content-Length: 4\r\nTransfer-Encoding: chunked", 400),
        ("1.1", "transfer-encoding: chunked\r\ncontent-length: 18", 400),
        ("1.0", "Transfer-Encoding: chunked", 400),
        ("1.1", "Content-Length: 4\r\nContent-Length: 5", 400),
        ("1.1", "Transfer-Encoding: gzip, chunked", 400),
        ("1.1", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", 400),
        ("1.1", "Transfer-Encoding: chunked", 200),
        ("1.1", "Content-Length: 18", 200),
    ],
)
def test_a_body_whose_end_is_ambiguous_is_refused_and_ends_its_connection(tmp_path, version, headers, status):
    """Catches a second request that a proxy in front takes for a body, and so lets pass unseen."""
    chunked = "transfer-encoding" in headers.lower()
    body = b"2\r\n{}\r\n0\r\n\r\n" if chunked else b'{"tags": ["long"]}'
    smuggled = b"GET /status.json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with served(tmp_path) as (url, _), connect(url) as connection:
        start = f"POST /api/v1/create_session HTTP/{version}\r\nHost: localhost\r\n{headers}\r\n\r\n"
        connection.sendall(start.encode() + body + smuggled)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1 ") == (1 if status == 400 else 2)


@pytest.mark.parametrize(
    "path",
    ["/api/v1/forward_backward", "/api/v1/create_session", "/v1/chat/completions", "/generate", "/api/v1/nothing"],
)
def test_a_client_that_leaves_during_its_upload_is_no_fault_of_the_service(tmp_path, caplog, path):
    """Catches a traceback in the log, and a status 500 in the metrics, that a client causes by going away."""
    with served(tmp_path) as (url, orchestrator):
        for framing in ("Content-Length: 100\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"):
            with connect(url) as connection:
                connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{framing}".encode())
                wait_for(lambda: "http_requests_open 2.0" in httpx.get(f"{url}/metrics").text)
            wait_for(lambda: "http_requests_open 1.0" in httpx.get(f"{url}/metrics").text)
        counted = httpx.get(f"{url}/metrics").text
    assert len(re.findall(r'xorl_http_requests_total\{.*status="499"\} 2.0', counted)) == 1
    assert 'status="500"' not in counted
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []
    assert (orchestrator.submits, orchestrator.tombstones) == ([], [])


def wait_for(is_so):
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_a_token_a_page_of_another_origin_is_refused(tmp_path):
    """Catches a web page that trains on, or deletes from, the service of who looks at it."""
    with served(tmp_path) as (url, orchestrator), httpx.Client(base_url=url) as client:
        body = {"model_id": "m"}
        for origin, status in (("http://elsewhere", 403), ("null", 403), (url, 200)):
            assert client.post("/api/v1/unload_model", json=body, headers={"origin": origin}).status_code == status
        assert len(orchestrator.submits) == 1
        # A name that resolves to this machine for a while makes the page one of the service's own.
        for host, status in (("elsewhere:5555", 403), ("127.0.0.1.elsewhere", 403), ("[x", 403), ("localhost:1", 200)):
            assert client.get("/status.json", headers={"host": host}).status_code == status, host
        own = {"host": "elsewhere:5555", "origin": "http://elsewhere:5555"}
        assert client.post("/api/v1/unload_model", json=body, headers=own).status_code == 403


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"host": "0.0.0.0"}, "api_token"),
        ({"host": "::"}, "api_token"),
        ({"host": "my-machine"}, "api_token"),
        ({"token": "short"}, "16"),
        ({"poll_s": 60}, "30"),
        ({"body_bytes": 2**40}, "max_request_mb"),
    ],
)
def test_settings_that_open_the_service_are_refused(settings, says):
    """Catches a service that listens to everyone without a token."""
    with pytest.raises(ValueError, match=says):
        ApiSettings("ipc:///nowhere", **settings)


def test_the_token_is_in_no_representation():
    """Catches a token in a log."""
    assert TOKEN not in repr(ApiSettings("ipc:///nowhere", token=TOKEN))
