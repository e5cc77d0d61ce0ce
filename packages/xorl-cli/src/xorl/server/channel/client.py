"""The asking end of a channel: connects, and connects again, and knows when the other side is gone."""

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

from xorl.server.channel.keys import ChannelKeys
from xorl.server.channel.wire import (
    ChannelError,
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

Answered = TypeVar("Answered")


class ChannelClient(Generic[Answered]):
    """Asks a ChannelServer; answers are of the types `answered`, a union of Message classes.

    `await start()` and `await close()` in one event loop; it connects by itself whenever the server is there.
    incarnation: the server's random name; another one means that the server was started anew.
    """

    def __init__(
        self,
        address: str,
        answered: UnionType | type[Message],
        *,
        keys: ChannelKeys | None = None,
        limits: Limits | None = None,
    ) -> None:
        check_address(address, keys)
        self._address = address
        self._decode = msgspec.msgpack.Decoder(answered).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._keys = keys
        self._limits = limits or Limits()
        self._waiting: dict[int, asyncio.Future[Answered]] = {}
        self._number = 0
        self._connected = asyncio.Event()
        self._mismatch: VersionMismatch | None = None
        self._last_sign = 0.0
        self.incarnation: str | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the server has answered a ping lately."""
        return self._connected.is_set()

    async def start(self) -> None:
        """Begin to connect; does not wait for it."""
        self._context = zmq.asyncio.Context()
        self._socket = new_socket(self._context, zmq.DEALER, self._limits)
        # Otherwise what was asked of a server that is gone would reach its successor, when nobody waits any more.
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
        """Stop; requests that wait raise PeerLost."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lose("this side has closed the channel")
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    async def move(self, address: str, keys: ChannelKeys | None) -> None:
        """Connect to another address from now on. Who waits to be connected waits on; other requests raise PeerLost."""
        check_address(address, keys)
        await self.close()
        self._address, self._keys, self._mismatch = address, keys, None
        await self.start()

    async def wait_connected(self, timeout_s: float) -> None:
        """Return once the server is there; TimeoutError after timeout_s, VersionMismatch where that is why."""
        try:
            await asyncio.wait_for(self._connected.wait(), timeout_s)
        except TimeoutError:
            if self._mismatch is not None:
                raise self._mismatch from None
            raise TimeoutError(f"nobody answers at {self._address} for {timeout_s:g} s") from None

    async def request(self, message: Message, *, timeout_s: float, connect_timeout_s: float = 10.0) -> Answered:
        """The answer to a request, which is sent once, as soon as the server is there.

        Raises:
            PeerLost: the server was lost before it answered, or did not appear within connect_timeout_s.
            TimeoutError: it is there, and has not answered within timeout_s.
            ChannelError: it refused, or the request is longer than the limit.
        """
        body = self._encode(message)
        if len(body) > self._limits.message_bytes:
            raise ChannelError(f"a message of {len(body)} bytes, at most {self._limits.message_bytes} are sent")
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
            raise PeerLost(f"{self._address} is gone: {problem}") from None

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                header = decode_header(frames[0])
            except msgspec.MsgspecError:
                logger.warning("event=answer_refused why=no_header")
                continue
            self._take(header, frames[-1])

    def _take(self, header: Header, body: bytes) -> None:
        if header.version != PROTOCOL_VERSION:
            self._mismatch = VersionMismatch(version_text("client", "server", header.version))
            self._fail_waiting(self._mismatch)
            return
        if header.incarnation != self.incarnation:
            if self.incarnation is not None:
                self._lose("it was started anew")
            self.incarnation = header.incarnation
        self._last_sign = time.monotonic()
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
            waiting.set_exception(ChannelError(f"the answer is none: {problem}"))

    async def _ping(self) -> None:
        """Ask whether the server is there, often until it is, and declare it lost after a silence."""
        while True:
            with contextlib.suppress(PeerLost):
                await self._send(encode_header("ping"), b"")
            await asyncio.sleep(self._limits.ping_every_s if self.is_connected else self._limits.ping_every_s / 20)
            if self.is_connected and time.monotonic() - self._last_sign > self._limits.lost_after_s:
                self._lose(f"it has been silent for {self._limits.lost_after_s:g} s")

    async def _watch(self) -> None:
        """Notice at once what pings would show later: that the connection was closed, or that there is one again."""
        while True:
            event = await recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._lose("the connection was closed")
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                with contextlib.suppress(PeerLost):
                    await self._send(encode_header("ping"), b"")

    def _lose(self, why: str) -> None:
        self._connected.clear()
        self._fail_waiting(PeerLost(f"the process at {self._address} was lost: {why}"))

    def _fail_waiting(self, problem: Exception) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(problem)
