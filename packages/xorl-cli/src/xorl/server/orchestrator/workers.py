"""The workers as the orchestrator sees them: whether they are there, whether they are still the same, and work."""

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


# How much memory they use is for people to look at.
HEALTH_EVERY_S = 10.0
# Far below what a restart takes, far above what a look costs.
LOOK_EVERY_S = 0.05
# A file on a disk that hosts share, while there is nobody to talk to.
FIND_EVERY_S = 1.0
# A thread beside the computation answers.
CANCEL_S = 10.0


class WorkersLost(Exception):
    """The workers that were asked are gone, with everything in their memory."""


class Workers:
    """The channel to rank 0. `on_change` is called whenever `is_ready` may have changed.

    find: says at which address and with which keys the newest workers are, if it knows; asked while they are absent.

    An incarnation is one start of the workers: their memory holds what was done in it, and they remember the results
    of the last operations that succeeded, so that work which is sent again is not done again.
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
        self._place = (address, keys)
        self._find = find
        self._asked_find = 0.0
        self._timeout_s = connection_timeout_s
        self._on_change = on_change
        self._absent_since: float | None = time.monotonic()  # None until an absence is noticed
        self.incarnation: str | None = None
        self.health: HealthResult | None = None
        self._asked_health = 0.0
        self._is_closing = False

    @property
    def is_connected(self) -> bool:
        """Whether rank 0 answers, if only to say that it still loads."""
        return self._channel.is_connected

    @property
    def is_ready(self) -> bool:
        """Whether the workers take work: they have answered Health since they were started."""
        return self.is_connected and self.incarnation is not None and self._channel.incarnation == self.incarnation

    @property
    def are_gone(self) -> bool:
        """Whether they were absent for so long that nobody should wait for them any more."""
        since = self._absent_since
        return since is not None and not self.is_connected and time.monotonic() - since > self._timeout_s

    @property
    def timeout_s(self) -> float:
        """How long they may be absent."""
        return self._timeout_s

    @property
    def max_context_length(self) -> int | None:
        """The tokens that the model has positions for; None until workers have said it."""
        return None if self.health is None else self.health.max_context_length

    async def start(self) -> asyncio.Task[None]:
        """Begin to connect; returns the task that looks for them until `close`, without which they are never found."""
        await self._channel.start()
        self._watching = asyncio.create_task(self._watch())
        return self._watching

    async def close(self) -> None:
        """Leave the workers alone."""
        # Before Python 3.12 an answer that comes at the same time swallows the cancellation (asyncio.wait_for).
        self._is_closing = True
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._channel.close()

    def current(self) -> Incarnation:
        """The workers that are there, by name: what is begun with them is ended with them or not at all."""
        if self.incarnation is None:
            raise WorkersLost("there are none")
        return Incarnation(self.incarnation, self)

    async def run(self, work: Work, incarnation: str) -> Done:
        """The results of work, which is sent again if only the connection was lost, and not the workers.

        Raises WorkersLost where they were replaced, or stayed away for longer than the time-out.
        """
        while True:
            # What is asked of who comes next, who knows no model, would be answered with a failure.
            await self._connected()
            if self.incarnation != incarnation or self._channel.incarnation != incarnation:
                raise WorkersLost("the workers were started anew")
            try:
                return await self._ask(work, connect_timeout_s=0.0)
            except PeerLost as problem:
                logger.warning("event=workers_lost why=%r", str(problem))
                # Until the channel has noticed, too, it would be asked again at once.
                await asyncio.sleep(LOOK_EVERY_S)
            except ChannelError as problem:
                failure = Failure("server", 500, f"the workers refused: {problem}")
                return Done(work.ids, [failure for _ in work.ids])

    async def cancel(self, request_id: str) -> None:
        """Have them end a sample at its next token. Where they cannot be asked, it is as if they had been too late."""
        with contextlib.suppress(PeerLost, TimeoutError, ChannelError):
            await self._channel.request(Cancel(request_id), timeout_s=CANCEL_S, connect_timeout_s=0.0)

    async def _ask(self, work: Work, *, connect_timeout_s: float = 10.0) -> Done:
        done = await self._channel.request(work, timeout_s=math.inf, connect_timeout_s=connect_timeout_s)
        assert isinstance(done, Done), "work is answered by what became of it"
        return done

    async def _connected(self) -> None:
        if self.is_connected:
            return
        try:
            await self._channel.wait_connected(self._timeout_s)
        except (TimeoutError, ChannelError) as problem:
            raise WorkersLost(str(problem)) from None

    async def _watch(self) -> None:
        """Ask each new incarnation whether it is ready, and notice when one goes."""
        was_connected = False
        while not self._is_closing:
            if self.is_connected != was_connected:
                was_connected = self.is_connected
                self._absent_since = None if was_connected else time.monotonic()
                self._on_change()
            if not self.is_connected:
                await self._follow()
            if self.is_connected and self._channel.incarnation != self.incarnation:
                await self._ask_health()
            if self.is_ready and time.monotonic() - self._asked_health > HEALTH_EVERY_S:
                await self._ask_health()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _follow(self) -> None:
        """Go to where the newest workers are, if that is elsewhere."""
        if self._find is None or time.monotonic() - self._asked_find < FIND_EVERY_S:
            return
        self._asked_find = time.monotonic()
        # The disk may be another host's.
        place = await asyncio.to_thread(self._find)
        if place is not None and place != self._place and not self.is_connected:
            self._place = place
            logger.info("event=workers_elsewhere address=%s", place[0])
            await self._channel.move(*place)

    async def _ask_health(self) -> None:
        asked, self._asked_health = self._channel.incarnation, time.monotonic()
        try:
            done = await self._ask(Work([f"health-{time.monotonic_ns()}"], [Health()]))
        except PeerLost:
            return
        except ChannelError as problem:
            logger.error("event=workers_unwell why=%r", str(problem))
            await asyncio.sleep(1.0)
            return
        (result,) = done.results
        if not isinstance(result, HealthResult):
            logger.error("event=workers_unwell why=%r", result)
            await asyncio.sleep(1.0)
            return
        self.health = result
        if asked != self.incarnation:
            logger.info("event=workers_ready incarnation=%s world_size=%d", asked, result.world_size)
            self.incarnation = asked
            self._on_change()


@dataclass(frozen=True)
class Incarnation:
    """One start of the workers, by its name."""

    name: str
    _workers: Workers = field(repr=False)

    async def run(self, work: Work) -> Done:
        """What they make of work; WorkersLost once they are not the ones any more."""
        return await self._workers.run(work, self.name)
