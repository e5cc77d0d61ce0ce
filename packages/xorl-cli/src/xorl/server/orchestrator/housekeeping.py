"""What happens by the clock: numbers that never come, workers that stay away, idle models, expired checkpoints."""

from __future__ import annotations

import asyncio
import logging
import math
import time

from xorl.server.operations import Failure, UnloadModel
from xorl.server.orchestrator import checkpoint_queries
from xorl.server.orchestrator.admission import Admission
from xorl.server.orchestrator.calls import RELEASE
from xorl.server.orchestrator.commit import JournalError
from xorl.server.orchestrator.journal import PRUNED_AT_ONCE, Retention
from xorl.server.orchestrator.registry import dropped, stored
from xorl.server.orchestrator.runner import stop_if_broken
from xorl.server.orchestrator.state import State

logger = logging.getLogger(__name__)

TICK_S = 1.0
# Pruning reads an index and writes; nothing is in a hurry for it.
PRUNE_EVERY_S = 15.0
# A release that failed, as for want of room, is tried again.
RETRY_RELEASE_S = 60.0
SAMPLERS_KEPT_S = 24 * 3600.0
SESSIONS_KEPT_S = 30 * 24 * 3600.0


class Housekeeping:
    """Runs until it is cancelled."""

    def __init__(self, state: State, admission: Admission, retention: Retention) -> None:
        self._state = state
        self._admission = admission
        self._retention = retention
        # All since when, by a clock that nobody sets: `time.monotonic`.
        self._gaps: dict[tuple[str, int], float] = {}
        self._released: dict[str, float] = {}
        self._pruned = -math.inf
        self._expiring: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """All of it, again and again."""
        try:
            while True:
                await asyncio.sleep(TICK_S)
                try:
                    await self.tick(time.time())
                except (JournalError, OSError) as problem:
                    logger.error("event=housekeeping_failed why=%r", str(problem))
        finally:
            if self._expiring is not None:
                self._expiring.cancel()

    async def tick(self, now: float) -> None:
        """Do everything that is due at `now`, seconds since 1970."""
        await self._give_up_on_workers()
        await self._give_up_on_gaps()
        await self._release_idle(now)
        if time.monotonic() - self._pruned >= PRUNE_EVERY_S:
            self._pruned = time.monotonic()
            await self._prune(now)

    async def _give_up_on_workers(self) -> None:
        state = self._state
        if not state.workers.are_gone or not len(state.scheduler):
            return
        message = (
            f"the workers have been away for more than {state.workers.timeout_s:g} s, so this did not run; models that "
            "were made are kept, and are there again when the workers are"
        )
        drained = state.scheduler.drain()
        state.doubt(ticket for ticket in drained if state.open[ticket.request_id].begun_by is not None)
        await state.fail(drained, Failure("server", 503, message))

    async def _give_up_on_gaps(self) -> None:
        """Fail the requests behind a number that nobody will send: running them would leave something out."""
        state, gaps, now = self._state, self._state.scheduler.gaps(), time.monotonic()
        keys = [(lane, gap.seq) for lane, gap in gaps.items()]
        self._gaps = {key: self._gaps.get(key, now) for key in keys}
        for (lane, seq), since in self._gaps.items():
            # While others were failed it may have been filled, or its model have gone.
            gap = state.scheduler.gap(lane)
            if now - since < state.options.gap_timeout_s or gap is None or gap.seq != seq:
                continue
            message = (
                f"request {seq} of this model did not arrive within {state.options.gap_timeout_s:g} s, so what was "
                "sent after it did not run; gradients are as they were before it. Go on with new requests"
            )
            await state.fail(state.scheduler.clear_lane(lane), Failure("user", 408, message))
            state.wake.set()

    async def _release_idle(self, now: float) -> None:
        """Take models whose clients are silent off the workers; they come back when they are called."""
        state, registry = self._state, self._state.registry
        busy = {request.ticket.lane for request in state.open.values()}
        since = time.monotonic() - RETRY_RELEASE_S
        self._released = {lane: tried for lane, tried in self._released.items() if tried > since}
        for model in list(registry.models.values()):
            if model.state != "ready" or model.lane in busy or model.lane in self._released:
                continue
            is_idle = now - registry.activity(model) > state.options.idle_session_timeout_s
            if is_idle or registry.has_left(model):
                self._released[model.lane] = time.monotonic()
                await self._admission.submit_own(UnloadModel(model.model_id), RELEASE)

    async def _forget(self, now: float) -> None:
        """Drop what nobody can ask for any more: old sessions that ended, samplers whose weights are gone."""
        registry, current = self._state.registry, self._state.workers.incarnation
        used = {model.session_id for model in registry.models.values() if model.is_there}
        sessions = [
            session
            for session in registry.sessions.values()
            if now - session.last_active > SESSIONS_KEPT_S and session.session_id not in used
        ]
        ended = {session.session_id for session in sessions}
        # One whose weights are gone has to say so to who still samples from it; a day is enough.
        samplers = [
            sampler
            for sampler in registry.samplers.values()
            if sampler.session_id in ended
            or (
                sampler.snapshot_of is not None
                and current not in (None, sampler.workers)
                and now - sampler.created > SAMPLERS_KEPT_S
            )
        ]
        for sampler in samplers:
            del registry.samplers[sampler.sampling_session_id]
        for session in sessions:
            del registry.sessions[session.session_id]
        await self._state.journal.put([dropped(record) for record in (*samplers, *sessions)])

    async def _prune(self, now: float) -> None:
        state = self._state
        retrieved, state.retrieved = state.retrieved, set()
        if retrieved:
            await state.journal.mark_retrieved(retrieved, now)
        models = [model for model in state.registry.models.values() if model.is_there]
        num_gone = await state.journal.prune(now, self._retention, {model.lane: model.next_seq for model in models})
        if num_gone >= PRUNED_AT_ONCE:
            self._pruned = -math.inf
        active = [*state.registry.sessions.values(), *models]
        await state.journal.put([stored(record) for record in active if record.last_active > now - 2 * PRUNE_EVERY_S])
        await self._forget(now)
        if self._expiring is None or self._expiring.done():
            # It may wait for a save, which nothing else here does.
            self._expiring = asyncio.create_task(checkpoint_queries.delete_expired(state, self._admission, now))
            self._expiring.add_done_callback(stop_if_broken)
