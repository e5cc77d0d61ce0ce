"""The answering end of a channel: binds, decodes what arrives by its type, and answers what the handler returns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Awaitable, Callable
from types import UnionType
from typing import Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from xorl.server.channel.keys import ChannelKeys
from xorl.server.channel.wire import (
    Header,
    Kind,
    Limits,
    check_address,
    decode_header,
    encode_header,
    new_socket,
    version_text,
)
from xorl.server.messages import PROTOCOL_VERSION
from xorl.server.operations import Message

logger = logging.getLogger(__name__)

Asked = TypeVar("Asked")


class ChannelServer(Generic[Asked]):
    """Answers requests of the types `asked`, a union of Message classes, at one address.

    handler: a request to its answer; many run at once. What it raises is logged and refused with its text.
    What is no request is refused, or dropped where its sender cannot be told, and counted in `num_refused`.

    Start it by `await bind()`, then run `serve()` until it is cancelled; both in one event loop.
    """

    def __init__(
        self,
        address: str,
        asked: UnionType | type[Message],
        handler: Callable[[Asked], Awaitable[Message]],
        *,
        keys: ChannelKeys | None = None,
        limits: Limits | None = None,
    ) -> None:
        check_address(address, keys)
        self._wanted_address = address
        self._decode = msgspec.msgpack.Decoder(asked).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._handler = handler
        self._keys = keys
        self._limits = limits or Limits()
        self._running: set[asyncio.Task[None]] = set()
        self._authenticator: AsyncioAuthenticator | None = None
        self.incarnation = secrets.token_hex(8)
        self.num_refused = 0

    async def bind(self) -> str:
        """Listen; returns the address, in which a port of `*` has become a number. RuntimeError where it is taken."""
        self._context = zmq.asyncio.Context()
        self._socket = new_socket(self._context, zmq.ROUTER, self._limits)
        if self._keys is not None:
            self._authenticator = AsyncioAuthenticator(self._context)
            self._authenticator.configure_curve_callback("*", _OneClient(self._keys.client_public))
            self._authenticator.start()
            self._keys.protect_server_(self._socket)
        if "[" in self._wanted_address:
            self._socket.setsockopt(zmq.IPV6, 1)
        try:
            self._socket.bind(self._wanted_address)
        except zmq.ZMQError as problem:
            self.close()
            raise RuntimeError(f"cannot listen at {self._wanted_address}: {problem}") from None
        address = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if address.startswith("ipc://"):
            os.chmod(address.removeprefix("ipc://"), 0o600)
        return address

    async def serve(self) -> None:
        """Answer until cancelled, then close. A request whose client has gone is still handled."""
        try:
            while True:
                frames = await self._socket.recv_multipart()
                await self._take(frames)
        finally:
            for task in self._running:
                task.cancel()
            self.close()

    def close(self) -> None:
        """Stop listening, if it has not been done."""
        if self._context.closed:
            return
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    async def _take(self, frames: list[bytes]) -> None:
        """One message of whoever: frames are the sender, a header and a body."""
        if len(frames) != 3:
            self._count_refusal(f"a message of {len(frames) - 1} frames, where 2 are wanted")
            return
        sender, head, body = frames
        try:
            header = decode_header(head)
        except msgspec.MsgspecError:
            self._count_refusal("a message without a header")
            return
        if header.version != PROTOCOL_VERSION:
            await self._refuse(sender, header, version_text("server", "client", header.version))
        elif header.kind == "ping":
            await self._send(sender, "pong", header.number, b"")
        elif header.kind != "request":
            self._count_refusal(f"a client that sent {header.kind}")
        elif len(self._running) >= self._limits.num_pending:
            await self._refuse(sender, header, f"{len(self._running)} requests are waiting already: try again later")
        else:
            await self._start(sender, header, body)

    async def _start(self, sender: bytes, header: Header, body: bytes) -> None:
        try:
            request = self._decode(body)
        except (msgspec.MsgspecError, RecursionError) as problem:
            await self._refuse(sender, header, f"this is no request: {problem}")
            return
        task = asyncio.create_task(self._answer(sender, header, request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, sender: bytes, header: Header, request: Asked) -> None:
        try:
            body = self._encode(await self._handler(request))
            if len(body) > self._limits.message_bytes:
                raise RuntimeError(f"the answer has {len(body)} bytes, at most {self._limits.message_bytes} are sent")
        # The border of the process: the client is told, and the others go on.
        except Exception as problem:
            logger.exception("event=request_failed request=%s", type(request).__name__)
            await self._refuse(sender, header, f"{type(problem).__name__}: {problem}")
            return
        await self._send(sender, "answer", header.number, body)

    async def _refuse(self, sender: bytes, header: Header, why: str) -> None:
        self._count_refusal(why)
        await self._send(sender, "refusal", header.number, self._encode(why))

    async def _send(self, receiver: bytes, kind: Kind, number: int, body: bytes) -> None:
        # Where the client has gone, a router drops what is for it, or says that it cannot be reached.
        with contextlib.suppress(zmq.ZMQError):
            await self._socket.send_multipart([receiver, encode_header(kind, number, self.incarnation), body])

    def _count_refusal(self, why: str) -> None:
        self.num_refused += 1
        # Whoever floods the socket does not also fill the log.
        if self.num_refused.bit_count() == 1:
            logger.warning("event=message_refused total=%d why=%r", self.num_refused, why[:500])


class _OneClient:
    """ZMQ's question at each connection: may whoever holds this key, in Z85, come in?"""

    def __init__(self, client_public: bytes) -> None:
        self._client_public = client_public

    def callback(self, domain: str, key: bytes) -> bool:
        return secrets.compare_digest(key, self._client_public)
