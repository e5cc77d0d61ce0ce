"""Those who wait for results: they are told when there is one, or why there is none yet."""

from __future__ import annotations

import asyncio
import logging

from xorl.server.messages import CANCELLED, Cancel, Finished, Ok, Pending, Poll, Unknown
from xorl.server.orchestrator.calls import decode_result
from xorl.server.orchestrator.commit import Damaged
from xorl.server.orchestrator.state import OpenRequest, State

logger = logging.getLogger(__name__)

# Proxies close connections that are silent for longer.
MAX_WAIT_S = 30.0


async def poll(state: State, ask: Poll) -> Pending | Finished | Unknown:
    """The result of a request, waited for if there is none yet."""
    request = state.open.get(ask.request_id)
    if request is not None and ask.wait_s > 0:
        await _wait(request, min(ask.wait_s, MAX_WAIT_S))
        request = state.open.get(ask.request_id)
    if request is not None:
        return _pending(state, request)
    stored = state.journal.find(ask.request_id)
    if stored is None:
        return Unknown(ask.request_id)
    if stored.result is None:
        # Between its acknowledgement and the queue there is an instant without either.
        return Unknown(ask.request_id, was_known=True) if stored.is_finished else Pending(ask.request_id)
    try:
        result = decode_result(stored.result)
    except Damaged as problem:
        logger.error("event=result_lost request=%s why=%r", ask.request_id, str(problem))
        return Unknown(ask.request_id, was_known=True)
    state.retrieved.add(ask.request_id)
    return Finished(ask.request_id, stored.dialect, result)


async def ended(state: State, request_id: str, within_s: float) -> None:
    """Return once a request has ended, if it has not, or after that time."""
    request = state.open.get(request_id)
    if request is not None:
        await _wait(request, within_s)


async def cancel(state: State, ask: Cancel) -> Ok:
    """End a sample: nothing is ordered behind it. Other requests run, whoever has lost interest."""
    request = state.open.get(ask.request_id)
    if request is None or request.ticket.lane is not None:
        return Ok()
    if state.scheduler.drop(request.ticket):
        await state.fail([request.ticket], CANCELLED)
        return Ok()
    # Whoever has it answers, and the runner ends it. It is not begun again, by others or alone.
    request.is_cancelled = True
    if request.asking is not None:
        request.asking.cancel()
    await state.workers.cancel(ask.request_id)
    return Ok()


async def _wait(request: OpenRequest, seconds: float) -> None:
    waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    request.waiting.append(waiting)
    try:
        await asyncio.wait_for(waiting, seconds)
    except TimeoutError:
        return
    finally:
        # Whoever polls for a day must not leave a day of futures behind.
        if waiting in request.waiting:
            request.waiting.remove(waiting)


def _pending(state: State, request: OpenRequest) -> Pending:
    ticket = request.ticket
    position = None if request.is_running else state.scheduler.place(ticket.arrival)
    if state.problem is not None:
        return Pending(ticket.request_id, "paused_capacity", position, state.problem)
    if not state.workers.is_ready:
        what = "are loading the model" if state.workers.is_connected else "are being started"
        return Pending(ticket.request_id, "paused_capacity", position, f"the workers {what}")
    gap = None if request.is_running or ticket.lane is None else state.scheduler.gap(ticket.lane)
    reason = None if gap is None else f"request {gap.seq} of this model has not arrived"
    return Pending(ticket.request_id, "active", position, reason)
