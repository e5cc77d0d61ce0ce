"""The orchestrator's connection to the workers: whether they are there, their incarnation, and running work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from xorl.server.channel import ChannelClient, ChannelError, ChannelKeys, Limits, PeerLost
from xorl.server.messages import Cancel, Done, Health, HealthResult, Ok, Work
from xorl.server.operations import Failure

logger = logging.getLogger(__name__)


# Refreshes the memory figures of the status page.
HEALTH_EVERY_S = 10.0
# Cheap, and far shorter than a restart of the workers.
POLL_EVERY_S = 0.05
# Reading the workers' file may go to a network file system.
FIND_EVERY_S = 1.0
# Rank 0 answers from a separate thread, even during a computation.
CANCEL_TIMEOUT_S = 10.0


class WorkersLost(Exception):
    """The incarnation of the workers that was used is gone, with everything in its memory."""


class Workers:
    """The channel to rank 0. `on_change` is called whenever `is_ready` may have changed.

    find: returns the address and keys of the newest workers, if known; called while the workers are absent.
    timeout_s: how long the workers may be absent before waiting requests fail.

    num_restarts, last_restart: how often, and when last, new workers replaced the previous ones. ready_at: when the
    current workers became ready.

    An incarnation is one start of the workers, with everything in their memory. They remember the results of their
    last successful operations, so work that is sent again is not run again.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: ChannelKeys | None = None,
        find: Callable[[], tuple[str, ChannelKeys | None] | None] | None = None,
        limits: Limits | None = None,
        connection_timeout_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self._channel: ChannelClient[Done | Ok] = ChannelClient(address, Done | Ok, keys=keys, limits=limits)
        self._location = (address, keys)
        self._find = find
        self._last_find = 0.0
        self.timeout_s = connection_timeout_s
        self._on_change = on_change
        self._absent_since: float | None = time.monotonic()  # None while they are present
        self.incarnation: str | None = None
        self.health: HealthResult | None = None
        self.num_restarts = 0
        self.last_restart: float | None = None
        self.ready_at = 0.0
        self._last_health_check = 0.0
        self._is_closing = False

    @property
    def is_connected(self) -> bool:
        """Whether rank 0 is connected; it may still be loading the model."""
        return self._channel.is_connected

    @property
    def is_ready(self) -> bool:
        """Whether the workers accept work: they have answered Health since they were started."""
        return self.is_connected and self.incarnation is not None and self._channel.incarnation == self.incarnation

    @property
    def absent_too_long(self) -> bool:
        """Whether the workers have been absent for longer than timeout_s, so that requests should not wait for them."""
        since = self._absent_since
        return since is not None and not self.is_connected and time.monotonic() - since > self.timeout_s

    @property
    def max_context_length(self) -> int | None:
        """The number of tokens that the model has positions for; None until workers have reported it."""
        return None if self.health is None else self.health.max_context_length

    async def start(self) -> asyncio.Task[None]:
        """Start connecting; returns the task that watches the workers until `close`."""
        await self._channel.start()
        self._watching = asyncio.create_task(self._watch())
        return self._watching

    async def close(self) -> None:
        """Disconnect; the workers keep running."""
        # Before Python 3.12, asyncio.wait_for loses a cancellation that arrives together with the answer.
        self._is_closing = True
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._channel.close()

    def current(self) -> Incarnation:
        """The current incarnation. Raises WorkersLost if there is none."""
        if self.incarnation is None:
            raise WorkersLost("the workers have not been ready yet")
        return Incarnation(self.incarnation, self)

    async def run(self, work: Work, incarnation: str) -> Done:
        """Run work and return its results. If only the connection is lost, send the work again.

        Raises WorkersLost if the workers are restarted, or absent for longer than timeout_s.
        """
        while True:
            # A new incarnation does not hold the models, so it must not get work that was prepared for another.
            try:
                if not self.is_connected:
                    await self._channel.wait_connected(self.timeout_s)
            except (TimeoutError, ChannelError) as problem:
                raise WorkersLost(str(problem)) from None
            if self.incarnation != incarnation or self._channel.incarnation != incarnation:
                raise WorkersLost("the workers were restarted")
            try:
                return await self._send(work, connect_timeout_s=0.0)
            except PeerLost as problem:
                logger.warning("event=workers_lost why=%r", str(problem))
                # Avoids a busy loop until the channel also notices the loss.
                await asyncio.sleep(POLL_EVERY_S)
            except ChannelError as problem:
                failure = Failure("server", 500, f"the workers refused the work: {problem}")
                return Done(work.ids, [failure for _ in work.ids])

    async def cancel(self, request_id: str) -> None:
        """Ask the workers to end a sample at its next token; if they cannot be reached, it may run to its end."""
        with contextlib.suppress(PeerLost, TimeoutError, ChannelError):
            await self._channel.request(Cancel(request_id), timeout_s=CANCEL_TIMEOUT_S, connect_timeout_s=0.0)

    async def _send(self, work: Work, *, connect_timeout_s: float = 10.0) -> Done:
        done = await self._channel.request(work, timeout_s=math.inf, connect_timeout_s=connect_timeout_s)
        assert isinstance(done, Done), "Work is answered by Done"
        return done

    async def _watch(self) -> None:
        """Check the health of each new incarnation and regularly afterwards, and detect absence."""
        was_connected = False
        while not self._is_closing:
            if self.is_connected != was_connected:
                was_connected = self.is_connected
                self._absent_since = None if was_connected else time.monotonic()
                self._on_change()
            if not self.is_connected:
                await self._follow_relocation()
            if self.is_connected and self._channel.incarnation != self.incarnation:
                await self._check_health()
            if self.is_ready and time.monotonic() - self._last_health_check > HEALTH_EVERY_S:
                await self._check_health()
            await asyncio.sleep(POLL_EVERY_S)

    async def _follow_relocation(self) -> None:
        """Reconnect if the newest workers have published another address."""
        if self._find is None or time.monotonic() - self._last_find < FIND_EVERY_S:
            return
        self._last_find = time.monotonic()
        # In a thread, since the file may be on a network file system.
        location = await asyncio.to_thread(self._find)
        if location is not None and location != self._location and not self.is_connected:
            self._location = location
            logger.info("event=workers_moved address=%s", location[0])
            await self._channel.reconnect(*location)

    async def _check_health(self) -> None:
        incarnation, self._last_health_check = self._channel.incarnation, time.monotonic()
        try:
            done = await self._send(Work([f"health-{time.monotonic_ns()}"], [Health()]))
        except PeerLost:
            return
        except ChannelError as problem:
            logger.error("event=workers_unhealthy why=%r", str(problem))
            await asyncio.sleep(1.0)
            return
        (result,) = done.results
        if not isinstance(result, HealthResult):
            logger.error("event=workers_unhealthy why=%r", result)
            await asyncio.sleep(1.0)
            return
        self.health = result
        if incarnation != self.incarnation:
            if self.incarnation is not None:
                self.num_restarts, self.last_restart = self.num_restarts + 1, time.time()
            logger.info("event=workers_ready incarnation=%s world_size=%d", incarnation, result.world_size)
            self.incarnation, self.ready_at = incarnation, time.time()
            self._on_change()


@dataclass(frozen=True)
class Incarnation:
    """One start of the workers, by its name."""

    name: str
    _workers: Workers = field(repr=False)

    async def run(self, work: Work) -> Done:
        """Run work on this incarnation. Raises WorkersLost once it is gone."""
        return await self._workers.run(work, self.name)
