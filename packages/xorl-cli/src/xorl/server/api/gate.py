"""The gate in front of all routes: authentication, limits of bodies, and metrics."""

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
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xorl.server.api.responses import Refusal

Body = TypeVar("Body")

# Paths that need no token: health checks of load balancers, and the status page, which asks for the token itself.
_OPEN_PATHS = frozenset({"/", "/health", "/api/v1/healthz"})
# Signed URLs, whose routes check the signature.
_SIGNED_PATHS = "/files/"
_MAX_TOKEN_BYTES = 4096
# How much of a body is kept to find the seq_id of a refused request.
HEAD_BYTES = 4096
# The limit of bodies without datums. Decoded JSON takes several times its size in memory, and decoding blocks the loop.
SMALL_BYTES = 2**23
_LATENCIES_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)


class ApiMetrics:
    """The API process's metrics for Prometheus."""

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
        self.body_bytes = Counter("xorl_http_body_bytes", "Bytes of request bodies, as sent.", registry=self.registry)
        self.refused = Counter("xorl_http_unauthorized", "Requests without the token.", registry=self.registry)


class Gate:
    """ASGI middleware that authenticates requests and counts them.

    Without a token, only this machine can connect, but web pages in its browser could send requests. Requests from
    another origin, or addressed to another host name, are therefore refused.
    """

    def __init__(self, app: ASGIApp, token: str | None, host: str, metrics: ApiMetrics) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        self._host = host
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or the server's lifespan events."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 500
        is_answered = False

        async def observe(message: Message) -> None:
            nonlocal status, is_answered
            if message["type"] == "http.response.start":
                status, is_answered = message["status"], True
            await send(message)

        self._metrics.open.inc()
        request = Request(scope)
        try:
            if _has_ambiguous_length(request):
                await _ambiguous_length_response(scope["path"])(scope, receive, observe)
            elif (refusal := self._refusal(request)) is not None:
                self._metrics.refused.inc()
                await refusal.response(scope["path"])(scope, receive, observe)
            else:
                await self._app(scope, receive, observe)
        except asyncio.CancelledError:
            # The process is stopping. Answer with 503, since some clients do not retry after a 500.
            if is_answered:
                raise
            await Refusal(503, "the service is stopping: retry the request").response()(scope, receive, observe)
        finally:
            self._metrics.open.dec()
            # Label with the path's template, since each id in a path would create a new time series.
            path = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(path, status).inc()
            self._metrics.seconds.labels(path).observe(time.perf_counter() - start)

    def _refusal(self, request: Request) -> Refusal | None:
        if self._token is None:
            origin, host = request.headers.get("origin"), request.headers.get("host", "")
            if origin is not None and origin.partition("://")[2] != host:
                return Refusal(403, "this service has no token and refuses requests from other web pages")
            # DNS rebinding: a page's own host name may resolve to this machine, which makes the origins equal.
            if not _is_this_machine(host, self._host):
                advice = "connect to localhost or an IP address, or start the service with api_token"
                return Refusal(403, f"this service has no token and refuses the host name {host[:100]!r}: {advice}")
            return None
        if request.url.path in _OPEN_PATHS or request.url.path.startswith(_SIGNED_PATHS):
            return None
        given = request.headers.get("x-api-key") or _bearer_token(request)
        if given and len(given) <= _MAX_TOKEN_BYTES and hmac.compare_digest(given.encode(), self._token):
            return None
        problem = "is missing" if not given else "is wrong"
        return Refusal(401, f"the API token {problem}: send it as X-API-Key or as Authorization: Bearer")


def _bearer_token(request: Request) -> str:
    """The token in the Authorization header; "" if there is none. The scheme's name may be in any case (RFC 9110)."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _has_ambiguous_length(request: Request) -> bool:
    """Whether a reverse proxy and this server might disagree about the body's end, which allows request smuggling."""
    if "transfer-encoding" not in request.headers:
        return False
    return "content-length" in request.headers or request.scope["http_version"] == "1.0"


def _ambiguous_length_response(path: str) -> Response:
    reason = "the request has both Content-Length and Transfer-Encoding, or has the latter in HTTP/1.0: send one length"
    response = Refusal(400, reason).response(path)
    # The rest of this connection may be more of the body or another request.
    response.headers["connection"] = "close"
    return response


def _is_this_machine(host: str, bound_host: str) -> bool:
    """Whether a Host header cannot be another site's name: it is localhost, an IP address, or the bound host."""
    try:
        name = urlsplit(f"//{host}").hostname or "localhost"
    except ValueError:
        return False
    if name in ("localhost", bound_host.lower()) or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class BodyReader:
    """Reads bodies within the limits of one body and of all bodies that are being read at once, in bytes."""

    def __init__(self, limit: int, in_flight_limit: int, metrics: ApiMetrics) -> None:
        self._limit = limit
        self._in_flight_limit = in_flight_limit
        self._in_flight = 0
        self._metrics = metrics

    async def read(self, request: Request, at_most: int | None = None) -> bytes:
        """The decompressed body, of at most `at_most` bytes (by default the reader's limit).

        Also stores the raw beginning of the body in request.state.head, even if the body is refused.

        Raises Refusal: 413 if it is too long, 415 for a compression other than zstd, 400 for invalid zstd, 429 if too
        many bytes are being read at once.
        """
        limit = self._limit if at_most is None else min(at_most, self._limit)
        request.state.head = b""
        announced = _announced_length(request)
        encoding = request.headers.get("content-encoding", "identity")
        if encoding not in ("identity", "zstd"):
            raise Refusal(415, f"content-encoding must be zstd or identity, got {encoding[:40]!r}")
        taken = 0
        chunks: list[bytes] = []
        try:
            async for chunk in request.stream():
                taken += len(chunk)
                self._in_flight += len(chunk)
                if len(request.state.head) < HEAD_BYTES:
                    request.state.head += chunk[:HEAD_BYTES]
                if max(taken, announced) > limit:
                    raise _too_long(limit)
                if self._in_flight > self._in_flight_limit:
                    raise Refusal(429, "too many bytes of requests are being read at once: retry later")
                chunks.append(chunk)
            body = b"".join(chunks)
            return _decompressed(body, limit) if encoding == "zstd" else body
        finally:
            self._in_flight -= taken
            self._metrics.body_bytes.inc(taken)

    async def parse(self, request: Request, kind: type[Body]) -> Body:
        """Decode a short JSON body, ignoring unknown fields. Raises Refusal(400) if it is invalid."""
        return decode(await self.read(request, SMALL_BYTES), kind)


def _decompressed(body: bytes, limit: int) -> bytes:
    try:
        plain = decompress(body, limit + 1)
    except zstandard.ZstdError as problem:
        raise Refusal(400, f"the body is not valid zstd: {problem}") from None
    if len(plain) > limit:
        raise _too_long(limit)
    return plain


def _too_long(limit: int) -> Refusal:
    return Refusal(413, f"the body of this call must have at most {limit} bytes: split the request")


def decompress(body: bytes, at_most: int) -> bytes:
    """Decompress at most the first `at_most` bytes. Raises ZstdError if the body is not valid zstd."""
    reader = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body)
    chunks: list[bytes] = []
    while at_most > 0 and (chunk := reader.read(at_most)):
        chunks.append(chunk)
        at_most -= len(chunk)
    return b"".join(chunks)


def _announced_length(request: Request) -> int:
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal():
        raise Refusal(400, "content-length is not a number")
    return int(announced)


def decode(body: bytes, kind: type[Body]) -> Body:
    """Decode JSON as `kind`; an empty body counts as {}. Raises Refusal(400) if it is invalid."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise Refusal(400, f"the body cannot be read: {problem}") from None
