"""A server for a program that is no event loop: a thread answers pings while the program computes."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import UnionType
from typing import Generic, TypeVar

import zmq

from xorl.server.channel.keys import ChannelKeys
from xorl.server.channel.server import ChannelServer
from xorl.server.channel.wire import Limits
from xorl.server.operations import Message

Asked = TypeVar("Asked")


@dataclass(frozen=True)
class Received(Generic[Asked]):
    """A request, and the way to answer it: `reply` or `fail`, once, from any thread."""

    message: Asked
    _answer: Future[Message] = field(repr=False)

    def reply(self, message: Message) -> None:
        """Send the answer; it is dropped where who asked has gone."""
        if not self._answer.cancelled():
            self._answer.set_result(message)

    def fail(self, problem: Exception) -> None:
        """Refuse it."""
        if not self._answer.cancelled():
            self._answer.set_exception(problem)


class BlockingServer(Generic[Asked]):
    """A ChannelServer in a thread of its own, which listens once this is made; see there for the arguments.

    Requests wait in the order in which they came until `receive` takes them. aside: called in that thread with each as
    it comes; what it answers is answered at once, and None lets the request wait.
    """

    def __init__(
        self,
        address: str,
        asked: UnionType | type[Message],
        *,
        keys: ChannelKeys | None = None,
        limits: Limits | None = None,
        aside: Callable[[Asked], Message | None] | None = None,
    ) -> None:
        self._requests: queue.Queue[Received[Asked]] = queue.Queue()
        self._aside = aside
        self._server: ChannelServer[Asked] = ChannelServer(address, asked, self._enqueue, keys=keys, limits=limits)
        self._loop = asyncio.new_event_loop()
        self._bound: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)
        self._thread.start()
        self.address = self._bound.result()
        self.incarnation = self._server.incarnation

    def receive(self, timeout_s: float | None = None) -> Received[Asked] | None:
        """The next request; None after timeout_s without one."""
        try:
            return self._requests.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stop listening."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    async def _enqueue(self, message: Asked) -> Message:
        if self._aside is not None and (at_once := self._aside(message)) is not None:
            return at_once
        answer: Future[Message] = Future()
        self._requests.put(Received(message, answer))
        return await asyncio.wrap_future(answer)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        try:
            address = await self._server.bind()
        # The constructor waits for it, and raises it.
        except (RuntimeError, OSError, zmq.ZMQError) as problem:
            self._bound.set_exception(problem)
            return
        self._task = asyncio.ensure_future(self._server.serve())
        self._bound.set_result(address)
        await asyncio.gather(self._task, return_exceptions=True)
        # Cancelled before it began, it has closed nothing, and would hold whoever connects.
        self._server.close()
