"""Periodic work: fails requests that can no longer run, evicts idle models, prunes the journal, deletes checkpoints."""

from __future__ import annotations

import asyncio
import logging
import math
import time

from xorl.server.messages import Tombstone
from xorl.server.operations import Failure, UnloadModel
from xorl.server.orchestrator import deletion
from xorl.server.orchestrator.admission import Admission
from xorl.server.orchestrator.commit import JournalError
from xorl.server.orchestrator.journal import PRUNED_AT_ONCE, Retention
from xorl.server.orchestrator.operation_properties import EVICTION
from xorl.server.orchestrator.registry import checkpoint_key, deleted, model_of_lane, stored
from xorl.server.orchestrator.runner import stop_if_broken
from xorl.server.orchestrator.state import State
from xorl.server.orchestrator.unnamed import KEPT_S, is_unnamed, unnamed_of

logger = logging.getLogger(__name__)

TICK_S = 1.0
# Pruning scans an index and writes, and is not urgent.
PRUNE_EVERY_S = 15.0
# When to retry an eviction that failed, for example for lack of storage.
RETRY_EVICTION_S = 60.0
# xorl-client repeats a request that could not be saved after at most 30 s; tinker does not repeat it.
UNSAVED_RETRY_S = 60.0
SAMPLERS_KEPT_S = 24 * 3600.0
# A session that is not used for this long counts as abandoned: few clients finish theirs.
SESSIONS_KEPT_S = 30 * 24 * 3600.0


class Housekeeping:
    """Periodic work of the orchestrator; `run` continues until it is cancelled."""

    def __init__(self, state: State, admission: Admission) -> None:
        self._state = state
        self._admission = admission
        self._retention = Retention(after_retrieval_s=state.options.result_retention_s)
        # Times of `time.monotonic`, which adjustments of the system clock do not affect.
        self._gaps: dict[tuple[str, int], float] = {}  # by lane and number: when the gap was first seen
        self._eviction_attempts: dict[str, float] = {}  # by lane
        self._end_attempts: dict[str, float] = {}
        self._pruned = -math.inf
        self._expiring: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Call `tick` every TICK_S."""
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
        await self._fail_without_workers()
        await self._fail_behind_gaps()
        await self._end_finished(now)
        await self._evict_idle(now)
        if time.monotonic() - self._pruned >= PRUNE_EVERY_S:
            self._pruned = time.monotonic()
            await self._prune(now)
            models = self._state.registry.models.values()
            self._state.progress.keep({model.lane for model in models if model.exists})

    async def _fail_without_workers(self) -> None:
        """Fail all queued requests if the workers have been absent for too long."""
        state = self._state
        if not state.workers.absent_too_long or not len(state.scheduler):
            return
        message = (
            f"the workers have been away for more than {state.workers.timeout_s:g} s, so this did not run; models that "
            "had been created are restored when the workers return"
        )
        drained = state.scheduler.drain()
        state.invalidate_models(ticket for ticket in drained if state.open[ticket.request_id].begun_by is not None)
        # Numbers are skipped after a restart, too, although an earlier one may still be running.
        await state.fail(drained, Failure("server", 503, message), skips_numbers=True)

    async def _fail_behind_gaps(self) -> None:
        """Fail the requests behind a number that did not arrive in time; running them would skip its changes.

        A number whose request was refused, but could not be marked as skipped in the journal, is skipped instead.
        """
        state, gaps, now = self._state, self._state.scheduler.gaps(), time.monotonic()
        keys = [(lane, gap.seq) for lane, gap in gaps.items()]
        self._gaps = {key: self._gaps.get(key, now) for key in keys}
        unsaved = state.unsaved
        for key in [key for key, refused in unsaved.items() if now - refused >= state.options.gap_timeout_s]:
            del unsaved[key]
        for (lane, seq), since in self._gaps.items():
            # While the requests of other lanes failed, the number may have arrived or the lane closed.
            gap = state.scheduler.gap(lane)
            if gap is None or gap.seq != seq:
                continue
            if now - unsaved.get((lane, seq), now) >= UNSAVED_RETRY_S:
                logger.info("event=unsaved_skipped lane=%s seq=%d", lane, seq)
                await self._admission.reject(Tombstone(model_of_lane(lane), seq))
                continue
            if now - since < state.options.gap_timeout_s:
                continue
            message = (
                f"request {seq} of this model did not arrive within {state.options.gap_timeout_s:g} s, so the requests "
                "after it did not run; accumulated gradients are unchanged. Continue with new requests"
            )
            await state.fail(state.scheduler.clear_lane(lane), Failure("user", 408, message))
            state.wake.set()

    async def _end_finished(self, now: float) -> None:
        """End the models whose sessions were finished or abandoned too long ago."""
        state, registry = self._state, self._state.registry
        if state.workers.absent_too_long:
            return  # they would have to unload it
        busy = {request.ticket.lane for request in state.open.values()}
        self._end_attempts = _recent(self._end_attempts)
        for model in list(registry.models.values()):
            if not model.exists or model.state == "creating" or model.lane in busy or model.lane in self._end_attempts:
                continue
            is_finished = registry.is_finished(model)
            kept_s = state.options.finished_session_retention_s if is_finished else SESSIONS_KEPT_S
            if now - registry.last_activity(model) >= kept_s:
                logger.info("event=ended model=%s why='its session was finished or abandoned'", model.model_id)
                self._end_attempts[model.lane] = time.monotonic()
                await self._admission.submit_internal(UnloadModel(model.model_id))

    async def _evict_idle(self, now: float) -> None:
        """Evict models whose clients are idle; their next request restores them."""
        state, registry = self._state, self._state.registry
        busy = {request.ticket.lane for request in state.open.values()}
        self._eviction_attempts = _recent(self._eviction_attempts)
        for model in list(registry.models.values()):
            if model.state != "ready" or model.lane in busy or model.lane in self._eviction_attempts:
                continue
            is_idle = now - registry.last_activity(model) > state.options.idle_session_timeout_s
            if is_idle or registry.client_has_left(model):
                self._eviction_attempts[model.lane] = time.monotonic()
                await self._admission.submit_internal(UnloadModel(model.model_id), EVICTION)

    async def _delete_old_records(self, now: float) -> None:
        """Delete the records of sessions long unused, of their samplers, and of samplers whose weights are gone."""
        registry = self._state.registry
        used = {model.session_id for model in registry.models.values() if model.exists}
        sessions = [
            session
            for session in registry.sessions.values()
            if now - session.last_active > SESSIONS_KEPT_S and session.session_id not in used
        ]
        ended = {session.session_id for session in sessions}
        # A sampler without weights is kept for a day, so that clients that still use it get a helpful error.
        samplers = [
            sampler
            for sampler in registry.samplers.values()
            if sampler.session_id in ended
            or (
                sampler.checkpoint is not None
                and is_unnamed(sampler.checkpoint)
                and checkpoint_key(sampler.checkpoint) not in registry.checkpoints
                and now - sampler.created > SAMPLERS_KEPT_S
            )
        ]
        for sampler in samplers:
            del registry.samplers[sampler.sampling_session_id]
        for session in sessions:
            del registry.sessions[session.session_id]
        await self._state.journal.put([deleted(record) for record in (*samplers, *sessions)])

    async def _prune(self, now: float) -> None:
        state = self._state
        retrieved, state.retrieved = state.retrieved, set()
        if retrieved:
            await state.journal.mark_retrieved(retrieved, now)
        models = [model for model in state.registry.models.values() if model.exists]
        num_pruned = await state.journal.prune(now, self._retention, {model.lane: model.next_seq for model in models})
        if num_pruned >= PRUNED_AT_ONCE:
            self._pruned = -math.inf
        active = [*state.registry.sessions.values(), *models]
        records = [stored(record) for record in active if record.last_active > now - 2 * PRUNE_EVERY_S]
        postponed = now + KEPT_S - 2 * PRUNE_EVERY_S
        records += [stored(one) for one in unnamed_of(state.registry) if (one.expires or 0.0) > postponed]
        await state.journal.put(records)
        await self._delete_old_records(now)
        if self._expiring is None or self._expiring.done():
            # In a separate task, since it may wait for saves.
            self._expiring = asyncio.create_task(deletion.delete_expired(state, now))
            self._expiring.add_done_callback(stop_if_broken)


def _recent(attempts: dict[str, float]) -> dict[str, float]:
    """The attempts that are too recent to be repeated."""
    since = time.monotonic() - RETRY_EVICTION_S
    return {lane: tried for lane, tried in attempts.items() if tried > since}
