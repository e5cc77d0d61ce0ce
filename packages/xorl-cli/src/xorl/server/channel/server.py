"""The server of a channel: decodes requests by their type, calls the handler, and sends its answers."""

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

from xorl.server.channel.wire import (
    ChannelKeys,
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

RequestT = TypeVar("RequestT")


class ChannelServer(Generic[RequestT]):
    """Answers requests at one address. request_type: the union of the Message classes of requests.

    handler: returns the answer to a request; many calls run concurrently. If it raises, the error is logged and the
        request is refused with the error's text.

    Invalid messages are refused, or dropped if the sender cannot be answered, and counted in `num_refused`.

    Call `await bind()`, then run `serve()` until it is cancelled, in the same event loop.
    """

    def __init__(
        self,
        address: str,
        request_type: UnionType | type[Message],
        handler: Callable[[RequestT], Awaitable[Message]],
        *,
        keys: ChannelKeys | None = None,
        limits: Limits | None = None,
    ) -> None:
        check_address(address, keys)
        self._requested_address = address
        self._decode = msgspec.msgpack.Decoder(request_type).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._handler = handler
        self._keys = keys
        self._limits = limits or Limits()
        self._running: set[asyncio.Task[None]] = set()
        self._authenticator: AsyncioAuthenticator | None = None
        self.incarnation = secrets.token_hex(8)
        self.num_refused = 0

    async def bind(self) -> str:
        """Listen; returns the address, with a port of `*` resolved. Raises RuntimeError if it cannot listen there."""
        self._context = zmq.asyncio.Context()
        self._socket = new_socket(self._context, zmq.ROUTER, self._limits)
        if self._keys is not None:
            self._authenticator = AsyncioAuthenticator(self._context)
            self._authenticator.configure_curve_callback("*", _ClientKeyCheck(self._keys.client_public))
            self._authenticator.start()
            self._keys.protect_server_(self._socket)
        if "[" in self._requested_address:
            self._socket.setsockopt(zmq.IPV6, 1)
        try:
            self._socket.bind(self._requested_address)
        except zmq.ZMQError as problem:
            self.close()
            raise RuntimeError(f"cannot listen at {self._requested_address}: {problem}") from None
        address = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if address.startswith("ipc://"):
            os.chmod(address.removeprefix("ipc://"), 0o600)
        return address

    async def serve(self) -> None:
        """Answer requests until cancelled, then close. Requests of clients that disconnect are still handled."""
        try:
            while True:
                frames = await self._socket.recv_multipart()
                await self._on_message(frames)
        finally:
            for task in self._running:
                task.cancel()
            self.close()

    def close(self) -> None:
        """Stop listening; may be called again."""
        if self._context.closed:
            return
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    async def _on_message(self, frames: list[bytes]) -> None:
        """Process one message, from any sender. The frames are the sender's id, a header and a body."""
        if len(frames) != 3:
            self._count_refusal(f"a message of {len(frames) - 1} frames instead of 2")
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
            self._count_refusal(f"a message of kind {header.kind}, which clients must not send")
        elif len(self._running) >= self._limits.num_pending:
            await self._refuse(sender, header, f"{len(self._running)} requests are pending already: try again later")
        else:
            await self._start(sender, header, body)

    async def _start(self, sender: bytes, header: Header, body: bytes) -> None:
        try:
            request = self._decode(body)
        except (msgspec.MsgspecError, RecursionError) as problem:
            await self._refuse(sender, header, f"not a valid request: {problem}")
            return
        task = asyncio.create_task(self._answer(sender, header, request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, sender: bytes, header: Header, request: RequestT) -> None:
        try:
            body = self._encode(await self._handler(request))
            if len(body) > self._limits.message_bytes:
                raise RuntimeError(f"the answer has {len(body)} bytes, the limit is {self._limits.message_bytes}")
        # Process boundary: the error is reported to this client; other requests are not affected.
        except Exception as problem:
            logger.exception("event=request_failed request=%s", type(request).__name__)
            await self._refuse(sender, header, f"{type(problem).__name__}: {problem}")
            return
        await self._send(sender, "answer", header.number, body)

    async def _refuse(self, sender: bytes, header: Header, reason: str) -> None:
        self._count_refusal(reason)
        await self._send(sender, "refusal", header.number, self._encode(reason))

    async def _send(self, receiver: bytes, kind: Kind, number: int, body: bytes) -> None:
        # If the client is gone, the ROUTER socket drops the message or raises that it is unreachable.
        with contextlib.suppress(zmq.ZMQError):
            await self._socket.send_multipart([receiver, encode_header(kind, number, self.incarnation), body])

    def _count_refusal(self, reason: str) -> None:
        self.num_refused += 1
        # Log at powers of two only, so that a flood of messages does not fill the log.
        if self.num_refused.bit_count() == 1:
            logger.warning("event=message_refused total=%d why=%r", self.num_refused, reason[:500])


class _ClientKeyCheck:
    """ZMQ's callback for each connection: whether the client's key, in Z85, is accepted."""

    def __init__(self, client_public: bytes) -> None:
        self._client_public = client_public

    def callback(self, domain: str, key: bytes) -> bool:
        return secrets.compare_digest(key, self._client_public)
