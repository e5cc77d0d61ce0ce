"""A server for programs without an event loop: a thread answers pings while the program computes."""

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

from xorl.server.channel.server import ChannelServer
from xorl.server.channel.wire import ChannelKeys, Limits
from xorl.server.operations import Message

RequestT = TypeVar("RequestT")


@dataclass(frozen=True)
class Received(Generic[RequestT]):
    """A received request. Answer it once, by `reply` or `fail`, from any thread."""

    message: RequestT
    _answer: Future[Message] = field(repr=False)

    def reply(self, message: Message) -> None:
        """Send the answer; it is dropped if the client is gone."""
        if not self._answer.cancelled():
            self._answer.set_result(message)

    def fail(self, problem: Exception) -> None:
        """Refuse the request."""
        if not self._answer.cancelled():
            self._answer.set_exception(problem)


class BlockingServer(Generic[RequestT]):
    """A ChannelServer in a background thread. It listens as soon as it is constructed; see there for the arguments.

    Requests are queued in the order of their arrival until `receive` takes them.

    intercept: called in the background thread with each request on arrival. If it returns a message, that is the
        answer; if it returns None, the request is queued.
    """

    def __init__(
        self,
        address: str,
        request_type: UnionType | type[Message],
        *,
        keys: ChannelKeys | None = None,
        limits: Limits | None = None,
        intercept: Callable[[RequestT], Message | None] | None = None,
    ) -> None:
        self._requests: queue.Queue[Received[RequestT]] = queue.Queue()
        self._intercept = intercept
        self._server: ChannelServer[RequestT] = ChannelServer(
            address, request_type, self._enqueue, keys=keys, limits=limits
        )
        self._loop = asyncio.new_event_loop()
        self._bound: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)
        self._thread.start()
        self.address = self._bound.result()
        self.incarnation = self._server.incarnation

    def receive(self, timeout_s: float | None = None) -> Received[RequestT] | None:
        """The next request, or None if none arrives within timeout_s."""
        try:
            return self._requests.get(timeout=timeout_s)
        except queue.Empty:
            return None

    @property
    def has_waiting(self) -> bool:
        """Whether a request waits to be received."""
        return not self._requests.empty()

    def close(self) -> None:
        """Stop listening."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    async def _enqueue(self, message: RequestT) -> Message:
        if self._intercept is not None and (intercepted := self._intercept(message)) is not None:
            return intercepted
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
        # The constructor waits for `_bound` and raises this there.
        except (RuntimeError, OSError, zmq.ZMQError) as problem:
            self._bound.set_exception(problem)
            return
        self._task = asyncio.ensure_future(self._server.serve())
        self._bound.set_result(address)
        await asyncio.gather(self._task, return_exceptions=True)
        # A task that is cancelled before it starts has not closed the socket; clients could still connect to it.
        self._server.close()
