"""Waits for the base: with full weights, one model at a time uses it, and requests of other models wait.

If a client is wrongly considered gone, nothing is lost: its model is saved, and restored when it calls again.
"""

from __future__ import annotations

import asyncio
import time

from xorl.server.operations import Failure, SaveWeights
from xorl.server.orchestrator.operation_properties import EVICTION, INTERNAL_PREFIX
from xorl.server.orchestrator.registry import ModelRecord
from xorl.server.orchestrator.state import OpenRequest, State

# While another model waits, a client with a session counts as gone after this many seconds of silence: three
# heartbeats of ten seconds, and some time for a slow one.
SILENCE_S = 35.0
# A client without heartbeats may be silent because it is busy with its last result.
SESSIONLESS_SILENCE_S = 120.0
# How long a request waits for the base while the client that uses it stays active.
MAX_WAIT_S = 300.0
POLL_S = 0.5


class BaseInUse(Exception):
    """A request needs the base while another model uses it and that model's client may still be active."""

    def __init__(self, owner: ModelRecord) -> None:
        super().__init__(owner.model_id)
        self.owner = owner


def is_client_silent(state: State, owner: ModelRecord) -> bool:
    """Whether the client whose model uses the base is gone: it waits for no request and has been silent."""
    if any(request.ticket.lane == owner.lane and request.kind != EVICTION for request in state.open.values()):
        return False
    return state.registry.client_has_left(owner) or _silent_for_s(state, owner) > _limit_s(owner)


async def wait_for_base(state: State, request: OpenRequest, owner: ModelRecord) -> Failure | None:
    """Wait until a request that needs the base can be retried; returns its failure if it has waited too long."""
    ticket, workers, incarnation = request.ticket, owner.workers, state.workers.incarnation
    if request.kind == SaveWeights.__name__ and ticket.request_id.startswith(INTERNAL_PREFIX):
        # A save of the model that uses the base may be waiting for this one.
        return Failure("user", 409, f"model {owner.model_id} uses the base")
    request.waiting_since = request.waiting_since or time.monotonic()
    request.running_since = None
    try:
        while (
            (owner.workers, owner.exists, state.workers.incarnation) == (workers, True, incarnation)
            and ticket.lane is not None
            and state.scheduler.has_lane(ticket.lane)
        ):
            if is_client_silent(state, owner) and _is_first_in_line(state, request):
                break
            seen = f"its client was last active {_silent_for_s(state, owner):.0f} s ago"
            if time.monotonic() - request.waiting_since > MAX_WAIT_S:
                message = (
                    f"model {owner.model_id} uses the base and its client is still active after {MAX_WAIT_S:.0f} s "
                    f"({seen}): unload that model or close its client, then try again"
                )
                return Failure("user", 409, message)
            request.waits_for = (
                f"model {owner.model_id} uses the base; {seen}, and counts as gone after {_limit_s(owner):.0f} s "
                "of silence"
            )
            await asyncio.sleep(POLL_S)
    finally:
        request.waits_for = None
    return None


def _is_first_in_line(state: State, request: OpenRequest) -> bool:
    """Whether no other request has waited longer. Without this, the one that happens to poll first would be next."""
    since = [other.waiting_since for other in state.open.values() if other.waits_for and other.waiting_since]
    return min(since, default=request.waiting_since) == request.waiting_since


def _silent_for_s(state: State, owner: ModelRecord) -> float:
    # While the orchestrator was down, no heartbeat could arrive.
    return time.time() - max(state.registry.last_activity(owner), state.started)


def _limit_s(owner: ModelRecord) -> float:
    return SILENCE_S if owner.session_id is not None else SESSIONLESS_SILENCE_S
