"""Where a client can make the service connect to by registering an inference server."""

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from asynchronous import in_a_loop
from engines import fake_engines
from orchestrated import options, over_http, running
from xorl.server.endpoint_queries import AddEndpoint, ConnectEndpoints
from xorl.server.endpoints import Destinations
from xorl.server.operations import Endpoint


@pytest.mark.parametrize(
    ("allowed", "host", "address", "is_permitted"),
    [
        (None, "localhost", "127.0.0.1", True),
        (None, "localhost", "::1", True),
        (None, "engine", "10.1.2.3", True),
        (None, "engine", "172.31.0.1", True),
        (None, "engine", "172.32.0.1", False),
        (None, "engine", "192.168.0.9", True),
        (None, "engine", "100.64.0.1", True),
        (None, "engine", "fd12::1", True),
        (None, "engine", "::ffff:10.1.2.3", True),
        (None, "engine", "8.8.8.8", False),
        (None, "engine", "2001:4860::1", False),
        (None, "engine", "0.0.0.0", False),
        (None, "metadata", "169.254.169.254", False),
        (None, "metadata", "::ffff:169.254.169.254", False),
        (None, "metadata", "fd00:ec2::254", False),
        (None, "metadata", "100.100.100.200", False),
        (None, "metadata", "fe80::1", False),
        (["0.0.0.0/0", "::/0"], "engine", "8.8.8.8", True),
        (["0.0.0.0/0", "::/0", "metadata"], "metadata", "169.254.169.254", False),
        (["Engine.example"], "engine.EXAMPLE", "8.8.8.8", True),
        (["engine.example"], "other.example", "8.8.8.8", False),
        (["10.0.0.7"], "engine", "10.0.0.8", False),
        ([], "engine", "127.0.0.1", False),
    ],
)
def test_addresses_that_clients_may_name(allowed, host, address, is_permitted):
    """Catches a client that reads a cloud's credentials, or calls hosts on the internet, through the service."""
    assert Destinations(allowed).permits(host, address) == is_permitted
    assert Destinations(allowed, trusted=[host.upper()]).permits(host, address)


def test_registration_connects_to_permitted_addresses_only(tmp_path, monkeypatch):
    """Catches a check of the name alone, or before the request only, and a host of the file that is refused."""
    resolved = {"moves": "127.0.0.1", "away": "169.254.169.254"}
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: resolve(resolved.get(host, host), *rest, **more)
    )

    @in_a_loop
    async def scenario(port):
        async def register(http, host):
            answer = await http.post("/add_inference_endpoint", json={"host": host, "port": port})
            return answer.status_code, answer.text

        async with running(options(tmp_path / "default")) as client, over_http(client) as http:
            assert (await register(http, "localhost"))[0] == 200
            assert (await register(http, "moves"))[0] == 200
            for refused in ("away", "169.254.169.254", "0xA9FEA9FE"):
                status, text = await register(http, refused)
                assert (status, "never allowed" in text) == (400, True), text
            status, text = await register(http, "192.0.2.1")
            assert (status, "at 192.0.2.1: add it to allowed_inference_hosts" in text) == (400, True), text
            for odd in ("127.0.0.1/secrets?", "a@127.0.0.1", "127.0.0.1#", "2130706433", "[::1]", "127.0.0.1:80"):
                status, text = await register(http, odd)
                assert (status, "needs a host name or address" in text) == (400, True), text
            resolved["moves"] = resolved["away"]
            states = (await client.orchestrator.answer(ConnectEndpoints())).endpoints
            assert {one.endpoint.host: one.state for one in states} == {"localhost": "healthy", "moves": "unreachable"}
        configured = (AddEndpoint(Endpoint("127.0.0.1", port)),)
        only = options(tmp_path / "only", allowed_inference_hosts=(), endpoints=configured)
        async with running(only) as client, over_http(client) as http:
            assert (await register(http, "127.0.0.1"))[0] == 200
            assert (await register(http, "localhost"))[0] == 400

    with fake_engines([]) as (engine,):
        scenario(engine.port)


@contextlib.contextmanager
def redirecting():
    """A server that sends everyone to another of its paths; yields its port and the paths that were requested."""
    paths = []

    class Redirect(BaseHTTPRequestHandler):
        def do_GET(self):
            paths.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Redirect)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1], paths
    finally:
        server.shutdown()
        server.server_close()


def test_a_redirect_is_not_followed(tmp_path):
    """Catches a server of a client's own that sends the service on to what the client may not reach."""

    @in_a_loop
    async def scenario(port):
        async with running(options(tmp_path)) as client, over_http(client) as http:
            answer = await http.post("/add_inference_endpoint", json={"host": "127.0.0.1", "port": port})
            assert (answer.status_code, "HTTP 302" in answer.text) == (400, True), answer.text

    with redirecting() as (port, paths):
        scenario(port)
    assert paths == ["/health"]
