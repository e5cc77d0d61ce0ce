"""The gate before all routes: who may come in, how much may be sent, and what is counted of it."""

from __future__ import annotations

import asyncio
import hmac
import time
from ipaddress import ip_address
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
import zstandard
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xorl.server.api.refusal import Refusal
from xorl.server.api.settings import ApiSettings

Body = TypeVar("Body")

# They tell nothing but whether the service is up, to load balancers that have no token; the page asks for one.
_OPEN_PATHS = frozenset({"/", "/health", "/api/v1/healthz"})
# These are URLs with a signature, which their route checks.
_SIGNED_PATHS = "/files/"
_MAX_TOKEN_BYTES = 4096
HEAD_BYTES = 4096
# For calls without datums. Numbers of JSON take several times its bytes, and are read while others wait.
SMALL_BYTES = 2**23
_LATENCIES_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)


class Measures:
    """What the API process counts of itself, for Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("path", "status")
        self.requests = Counter("xorl_http_requests", "Answered requests.", labels, registry=self.registry)
        self.seconds = Histogram(
            "xorl_http_request_seconds",
            "From a request's header to its answer.",
            ("path",),
            buckets=_LATENCIES_S,
            registry=self.registry,
        )
        self.open = Gauge("xorl_http_requests_open", "Requests that are not answered yet.", registry=self.registry)
        self.body_bytes = Counter("xorl_http_body_bytes", "Of bodies, as sent.", registry=self.registry)
        self.refused = Counter("xorl_http_unauthorized", "Requests without the token.", registry=self.registry)


class Gate:
    """Lets requests with the token through and counts what becomes of them.

    Without a token only this machine connects, and there the danger is a page in a browser that posts to it: requests
    from another origin, or to another name of this machine, are refused.
    """

    def __init__(self, app: ASGIApp, settings: ApiSettings, measures: Measures) -> None:
        self._app = app
        self._token = None if settings.token is None else settings.token.encode()
        self._host = settings.host
        self._measures = measures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection's request, or the server's own start and end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        status = 500
        is_answered = False

        async def observe(message: Message) -> None:
            nonlocal status, is_answered
            if message["type"] == "http.response.start":
                status, is_answered = message["status"], True
            await send(message)

        self._measures.open.inc()
        try:
            refusal = self._refusal(Request(scope))
            if refusal is not None:
                self._measures.refused.inc()
                await refusal.response()(scope, receive, observe)
            else:
                await self._app(scope, receive, observe)
        except asyncio.CancelledError:
            # The process ends, and what is open with it; to a 500, some clients do not come back.
            if is_answered:
                raise
            await Refusal(503, "the service is being stopped: send this again").response()(scope, receive, observe)
        finally:
            self._measures.open.dec()
            # The template of the path, since ids in it would make a new row each.
            path = getattr(scope.get("route"), "path", "other")
            self._measures.requests.labels(path, status).inc()
            self._measures.seconds.labels(path).observe(time.perf_counter() - begun)

    def _refusal(self, request: Request) -> Refusal | None:
        if self._token is None:
            origin, host = request.headers.get("origin"), request.headers.get("host", "")
            if origin is not None and origin.partition("://")[2] != host:
                return Refusal(403, "this service has no token and takes no requests from other web pages")
            # A page can have its own name resolve to this machine, and is then of this very origin.
            if not _is_this_machine(host, self._host):
                wanted = "as localhost or by a number, or start it with api_token"
                return Refusal(403, f"this service has no token and is called {host[:100]!r}: reach it {wanted}")
            return None
        if request.url.path in _OPEN_PATHS or request.url.path.startswith(_SIGNED_PATHS):
            return None
        bearer = request.headers.get("authorization", "")
        given = request.headers.get("x-api-key") or bearer.removeprefix("Bearer ")
        if given and len(given) <= _MAX_TOKEN_BYTES and hmac.compare_digest(given.encode(), self._token):
            return None
        said = "is missing" if not given else "is wrong"
        return Refusal(401, f"the API token {said}: send it as X-API-Key or as Authorization: Bearer")


def _is_this_machine(host: str, own: str) -> bool:
    """Whether a Host header is a name that no one else can give: of the loopback, an address, or what was bound."""
    try:
        name = urlsplit(f"//{host}").hostname or "localhost"
    except ValueError:
        return False
    if name in ("localhost", own.lower()) or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class Bodies:
    """Reads bodies within the settings' limits."""

    def __init__(self, settings: ApiSettings, measures: Measures) -> None:
        self._limit = settings.body_bytes
        self._in_flight_limit = settings.bytes_in_flight
        self._in_flight = 0
        self._measures = measures

    async def read(self, request: Request, at_most: int | None = None) -> bytes:
        """The body, decompressed, of at most so many bytes; None is the settings' limit.

        Its begin stays in request.state.head, as it came, also where it is refused.

        Raises Refusal: 413 too long, 415 compressed in another way than zstd, 400 no zstd, 429 too much at once.
        """
        limit = self._limit if at_most is None else min(at_most, self._limit)
        request.state.head = b""
        announced = _announced_length(request)
        encoding = request.headers.get("content-encoding", "identity")
        if encoding not in ("identity", "zstd"):
            raise Refusal(415, f"content-encoding is zstd or none, got {encoding[:40]!r}")
        taken = 0
        pieces: list[bytes] = []
        try:
            async for piece in request.stream():
                taken += len(piece)
                self._in_flight += len(piece)
                if len(request.state.head) < HEAD_BYTES:
                    request.state.head += piece[:HEAD_BYTES]
                if max(taken, announced) > limit:
                    raise _too_long(limit)
                if self._in_flight > self._in_flight_limit:
                    raise Refusal(429, "too many bytes of requests are being read at once: try again")
                pieces.append(piece)
            body = b"".join(pieces)
            return _decompressed(body, limit) if encoding == "zstd" else body
        finally:
            self._in_flight -= taken
            self._measures.body_bytes.inc(taken)

    async def parse(self, request: Request, kind: type[Body]) -> Body:
        """A short JSON body of that kind, whose unknown fields are passed over; Refusal(400) names what is wrong."""
        return decode(await self.read(request, SMALL_BYTES), kind)


def _decompressed(body: bytes, limit: int) -> bytes:
    try:
        plain = decompress(body, limit + 1)
    except zstandard.ZstdError as problem:
        raise Refusal(400, f"the body is not zstd: {problem}") from None
    if len(plain) > limit:
        raise _too_long(limit)
    return plain


def _too_long(limit: int) -> Refusal:
    return Refusal(413, f"a body of this call has at most {limit} bytes: send less at once")


def decompress(body: bytes, at_most: int) -> bytes:
    """What zstd holds, or the first at_most bytes of it; ZstdError for what is no zstd."""
    reader = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body)
    pieces: list[bytes] = []
    while at_most > 0 and (piece := reader.read(at_most)):
        pieces.append(piece)
        at_most -= len(piece)
    return b"".join(pieces)


def _announced_length(request: Request) -> int:
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal():
        raise Refusal(400, "content-length is no number")
    return int(announced)


def decode(body: bytes, kind: type[Body]) -> Body:
    """JSON as that kind; an empty body is an empty object. Refusal(400) names what is wrong."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise Refusal(400, f"the body cannot be read: {problem}") from None
