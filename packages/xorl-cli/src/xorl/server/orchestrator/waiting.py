"""Waiting for results: polls, cancellation, and the reason why a request has not ended yet."""

from __future__ import annotations

import asyncio
import logging

from xorl.server.messages import CANCELLED, Cancel, CancelOutcome, Finished, Pending, Poll, Unknown
from xorl.server.operations import ForwardBackward
from xorl.server.orchestrator.commit import Damaged
from xorl.server.orchestrator.operation_properties import INTERNAL_PREFIX, decode_result, encode
from xorl.server.orchestrator.state import OpenRequest, State

logger = logging.getLogger(__name__)

# Proxies close connections that are silent for longer.
MAX_WAIT_S = 30.0
# How long the answer to a cancellation waits for the end of a request that is being stopped.
CANCEL_WAIT_S = 5.0


async def poll(state: State, query: Poll) -> Pending | Finished | Unknown:
    """The result of a request, waiting for it up to `wait_s`."""
    request = state.open.get(query.request_id)
    if request is not None and query.wait_s > 0:
        await wait_for_end(request, min(query.wait_s, MAX_WAIT_S))
        request = state.open.get(query.request_id)
    if request is not None:
        return _pending(state, request)
    stored = state.journal.find(query.request_id)
    if stored is None:
        return Unknown(query.request_id)
    if stored.result is None:
        # A request is in the journal for a moment before it is in `open`.
        return Unknown(query.request_id, was_known=True) if stored.is_finished else Pending(query.request_id)
    try:
        result = decode_result(stored.result)
    except Damaged as problem:
        logger.error("event=result_lost request=%s why=%r", query.request_id, str(problem))
        return Unknown(query.request_id, was_known=True)
    state.retrieved.add(query.request_id)
    return Finished(query.request_id, stored.dialect, result)


async def cancel(state: State, query: Cancel) -> CancelOutcome | Unknown:
    """Cancel a request that has not begun, a sample or a pass. Returns the outcome once it is known."""
    request_id, request = query.request_id, state.open.get(query.request_id)
    if request is None:
        stored = state.journal.find(request_id)
        if stored is None:
            return Unknown(request_id)
        return CancelOutcome(request_id, "cancelled" if stored.result == encode(CANCELLED) else "finished")
    if request_id.startswith(INTERNAL_PREFIX):
        return Unknown(request_id)
    ticket = request.ticket
    # The workers may have computed a request that began before this process started; they remember its result.
    may_have_run = ticket.lane is not None and request.begun_by is not None
    if not may_have_run and state.scheduler.drop(ticket):
        request.is_cancelled = True
        await state.cancel_queued(ticket)
        if request.suspended is not None:
            await state.workers.cancel(request_id)
        state.wake.set()
        return CancelOutcome(request_id, "cancelled")
    if ticket.lane is not None and request.kind != ForwardBackward.__name__ and not request.is_cancelled:
        # It runs, and later requests of its model depend on it.
        return CancelOutcome(request_id, "running")
    # The endpoint or the workers stop it (a pass between two micro-batches, if no other request shares it), and the
    # runner ends the request. The flag keeps the runner from retrying it.
    request.is_cancelled = True
    if request.endpoint_task is not None:
        request.endpoint_task.cancel()
    await state.workers.cancel(request_id)
    await wait_for_end(request, CANCEL_WAIT_S)
    if request_id in state.open:
        return CancelOutcome(request_id, "cancelling")
    return await cancel(state, query)


async def wait_for_end(request: OpenRequest, timeout_s: float) -> None:
    """Return once a request has ended, or after timeout_s."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    request.waiters.append(waiter)
    try:
        await asyncio.wait_for(waiter, timeout_s)
    except TimeoutError:
        return
    finally:
        # Repeated polls must not accumulate futures.
        if waiter in request.waiters:
            request.waiters.remove(waiter)


def _pending(state: State, request: OpenRequest) -> Pending:
    ticket = request.ticket
    position = None if request.is_running else state.scheduler.queue_position(ticket.arrival)
    if state.storage_problem is not None:
        return Pending(ticket.request_id, "paused_capacity", position, state.storage_problem)
    if not state.workers.is_ready:
        activity = "are loading the model" if state.workers.is_connected else "are starting"
        return Pending(ticket.request_id, "paused_capacity", position, f"the workers {activity}")
    if request.waits_for is not None:
        return Pending(ticket.request_id, "paused_capacity", None, request.waits_for)
    gap = None if request.is_running or ticket.lane is None else state.scheduler.gap(ticket.lane)
    return Pending(ticket.request_id, "active", position, None if gap is None else gap.reason)
