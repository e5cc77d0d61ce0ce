"""The client of a channel: connects, reconnects, and detects when the server is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from types import UnionType
from typing import Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from xorl.server.channel.wire import (
    ChannelError,
    ChannelKeys,
    Header,
    Limits,
    PeerLost,
    VersionMismatch,
    check_address,
    decode_header,
    encode_header,
    new_socket,
    version_text,
)
from xorl.server.messages import PROTOCOL_VERSION
from xorl.server.operations import Message

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")


class ChannelClient(Generic[AnswerT]):
    """Sends requests to a ChannelServer. answer_type: the union of the Message classes of answers.

    Call `await start()` and `await close()` in the same event loop. The client connects whenever the server is up.

    incarnation: the server's random name; it changes when the server restarts.
    """

    def __init__(
        self,
        address: str,
        answer_type: UnionType | type[Message],
        *,
        keys: ChannelKeys | None = None,
        limits: Limits | None = None,
    ) -> None:
        check_address(address, keys)
        self._address = address
        self._decode = msgspec.msgpack.Decoder(answer_type).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._keys = keys
        self._limits = limits or Limits()
        self._waiting: dict[int, asyncio.Future[AnswerT]] = {}
        self._number = 0
        self._connected = asyncio.Event()
        self._mismatch: VersionMismatch | None = None
        self._last_received = 0.0
        self.incarnation: str | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the server has answered a ping recently."""
        return self._connected.is_set()

    async def start(self) -> None:
        """Start to connect in the background."""
        self._context = zmq.asyncio.Context()
        self._socket = new_socket(self._context, zmq.DEALER, self._limits)
        # Without a connection, do not queue messages: a restarted server would get requests that no one waits for.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        if "[" in self._address:
            self._socket.setsockopt(zmq.IPV6, 1)
        if self._keys is not None:
            self._keys.protect_client_(self._socket)
        self._monitor = self._socket.get_monitor_socket()
        self._socket.connect(self._address)
        self._tasks = [asyncio.create_task(work()) for work in (self._receive, self._ping, self._watch)]

    async def close(self) -> None:
        """Disconnect and stop; pending requests raise PeerLost."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._mark_lost("the client closed the channel")
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    async def reconnect(self, address: str, keys: ChannelKeys | None) -> None:
        """Switch to another address. Requests that wait for a connection keep waiting; sent ones raise PeerLost."""
        check_address(address, keys)
        await self.close()
        self._address, self._keys, self._mismatch = address, keys, None
        await self.start()

    async def wait_connected(self, timeout_s: float) -> None:
        """Wait until connected. After timeout_s, raises VersionMismatch if the versions differ, else TimeoutError."""
        try:
            await asyncio.wait_for(self._connected.wait(), timeout_s)
        except TimeoutError:
            if self._mismatch is not None:
                raise self._mismatch from None
            raise TimeoutError(f"no server answered at {self._address} within {timeout_s:g} s") from None

    async def request(self, message: Message, *, timeout_s: float, connect_timeout_s: float = 10.0) -> AnswerT:
        """Send a request once, as soon as the server is connected, and return the answer.

        Raises:
            PeerLost: the server was lost before it answered, or did not connect within connect_timeout_s.
            TimeoutError: the server is connected but has not answered within timeout_s.
            ChannelError: the server refused the request, or the request exceeds the limit.
        """
        body = self._encode(message)
        if len(body) > self._limits.message_bytes:
            raise ChannelError(f"the request has {len(body)} bytes, the limit is {self._limits.message_bytes}")
        if not self.is_connected:
            try:
                await self.wait_connected(connect_timeout_s)
            except TimeoutError as problem:
                raise PeerLost(str(problem)) from None
        self._number += 1
        number = self._number
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await self._send(encode_header("request", number), body)
            return await asyncio.wait_for(answer, timeout_s)
        finally:
            self._waiting.pop(number, None)

    async def _send(self, head: bytes, body: bytes) -> None:
        try:
            await self._socket.send_multipart([head, body], flags=zmq.NOBLOCK)
        except zmq.ZMQError as problem:
            raise PeerLost(f"cannot send to {self._address}: {problem}") from None

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                header = decode_header(frames[0])
            except msgspec.MsgspecError:
                logger.warning("event=answer_refused why=no_header")
                continue
            self._on_message(header, frames[-1])

    def _on_message(self, header: Header, body: bytes) -> None:
        if header.version != PROTOCOL_VERSION:
            self._mismatch = VersionMismatch(version_text("client", "server", header.version))
            self._fail_waiting(self._mismatch)
            return
        if header.incarnation != self.incarnation:
            if self.incarnation is not None:
                self._mark_lost("it restarted")
            self.incarnation = header.incarnation
        self._last_received = time.monotonic()
        if header.kind == "pong":
            self._mismatch = None
            self._connected.set()
            return
        waiting = self._waiting.get(header.number)
        if waiting is None or waiting.done():
            return
        try:
            if header.kind == "answer":
                waiting.set_result(self._decode(body))
            else:
                waiting.set_exception(ChannelError(msgspec.msgpack.decode(body, type=str)))
        except msgspec.MsgspecError as problem:
            waiting.set_exception(ChannelError(f"the answer cannot be decoded: {problem}"))

    async def _ping(self) -> None:
        """Ping the server, more often until it answers, and declare it lost if it stays silent."""
        while True:
            with contextlib.suppress(PeerLost):
                await self._send(encode_header("ping"), b"")
            await asyncio.sleep(self._limits.ping_every_s if self.is_connected else self._limits.ping_every_s / 20)
            if self.is_connected and time.monotonic() - self._last_received > self._limits.lost_after_s:
                self._mark_lost(f"it has been silent for {self._limits.lost_after_s:g} s")

    async def _watch(self) -> None:
        """Detect a closed or new connection at once, before the next ping would."""
        while True:
            event = await recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._mark_lost("the connection was closed")
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                with contextlib.suppress(PeerLost):
                    await self._send(encode_header("ping"), b"")

    def _mark_lost(self, reason: str) -> None:
        self._connected.clear()
        self._fail_waiting(PeerLost(f"the process at {self._address} was lost: {reason}"))

    def _fail_waiting(self, problem: Exception) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(problem)
