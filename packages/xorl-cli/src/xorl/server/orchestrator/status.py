"""Answers queries about the status: running calls, clients, training progress and resources."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from msgspec.structs import replace

from xorl.server.messages import Rejected
from xorl.server.orchestrator.registry import SESSION_SILENCE_S, SESSIONLESS_SILENCE_S, ModelRecord, SessionRecord
from xorl.server.orchestrator.state import State
from xorl.server.orchestrator.storage import STATUS_WAIT_S
from xorl.server.restarts import read_restarts
from xorl.server.status_queries import (
    GetStatus,
    GetStorage,
    ModelStatus,
    ProcessStatus,
    RunningCall,
    SessionStatus,
    Status,
    Storage,
    WaitingCall,
)


async def get_status(state: State, query: GetStatus) -> Status:
    """The current status."""
    health, workers = state.workers.health, state.workers
    processes, running = _processes(state), _running_calls(state)
    oldest_s = max((time.time() - call.since for call in running), default=0.0)
    storage = await state.storage.read(state.options, STATUS_WAIT_S)
    return Status(
        started=state.started,
        ready=workers.is_ready,
        workers_connected=workers.is_connected,
        world_size=health.world_size if health else 0,
        queue_depth=len(state.scheduler),
        running=running,
        processes=processes,
        tokens_per_second=state.counters.tokens_per_second(),
        token_rates=state.counters.token_rates(),
        sessions=_session_statuses(state),
        models=_model_statuses(state),
        endpoints=state.inference.states,
        gpu_bytes_used=health.gpu_bytes_used if health else [],
        gpu_bytes_total=health.gpu_bytes_total if health else [],
        last_errors=list(state.counters.errors)[::-1],
        counters=dict(state.counters.totals)
        | {f'process_restarts_total{{process="{one.name}"}}': float(one.num_restarts) for one in processes},
        gauges=_gauges(state)
        | {"oldest_running_call_seconds": oldest_s}
        | {f'process_hung{{process="{one.name}"}}': float(one.hung_since is not None) for one in processes}
        | _storage_gauges(storage),
        storage=storage,
        waiting=_waiting_calls(state),
    )


async def get_storage(state: State, query: GetStorage) -> Storage | Rejected:
    """The storage that output_dir takes."""
    storage = await state.storage.read(state.options)
    return storage or Rejected(503, "the storage could not be measured; see the service's log")


def _running_calls(state: State) -> list[RunningCall]:
    """The running requests, grouped by kind and client, the oldest first."""
    found: dict[tuple[str, str | None, str], RunningCall] = {}
    running = [request for request in state.open.values() if request.running_since is not None]
    for request in sorted(running, key=lambda request: request.running_since or 0.0):
        model = state.model_of(request.ticket)
        model_id = None if model is None else model.model_id
        key = (request.kind, model_id, request.ticket.client)
        call = found.get(key)
        if call is None:
            ticket, since = request.ticket, request.running_since or 0.0
            found[key] = RunningCall(ticket.request_id, request.kind, model_id, ticket.client, since, request.attempts)
        else:
            attempts = max(call.attempts, request.attempts)
            found[key] = replace(call, num_calls=call.num_calls + 1, attempts=attempts)
    return list(found.values())


def _waiting_calls(state: State) -> list[WaitingCall]:
    """The requests that were put off, and the first of each model's that wait for a missing number."""
    reasons = {one.ticket.request_id: one.waits_for for one in state.open.values() if one.waits_for is not None}
    reasons |= {gap.waiting[0].request_id: gap.reason for gap in state.scheduler.gaps().values()}
    found: list[WaitingCall] = []
    for request_id, request in state.open.items():
        if request_id in reasons:
            model = state.model_of(request.ticket)
            model_id = None if model is None else model.model_id
            found.append(WaitingCall(request_id, request.kind, model_id, reasons[request_id]))
    return found


def _processes(state: State) -> list[ProcessStatus]:
    """The processes and their restarts. Restarts of workers not started by the launcher are counted by connection."""
    file, workers = state.options.restarts_file, state.workers
    found = read_restarts(None if file is None else Path(file))
    if all(one.name != "workers" for one in found):
        reason = "the connection to the first worker was lost" if workers.num_restarts else None
        found = [ProcessStatus("workers", workers.num_restarts, workers.last_restart, reason), *found]
    # The launcher does not know when new workers are ready.
    return [
        replace(one, hung_since=None) if one.name == "workers" and workers.ready_at > (one.hung_since or 0.0) else one
        for one in found
    ]


def _gauges(state: State) -> dict[str, float]:
    return {
        "queued_requests": float(len(state.scheduler)),
        "open_requests": float(len(state.open)),
        "models": float(sum(model.state == "ready" for model in state.registry.models.values())),
        "tokens_per_second": state.counters.tokens_per_second(),
        "journal_bytes": float(state.journal.size_bytes()),
        "workers_ready": float(state.workers.is_ready),
    }


def _storage_gauges(storage: Storage | None) -> dict[str, float]:
    if storage is None:
        return {}
    gauges = {"storage_limit_bytes": float(storage.limit_bytes)}
    for kind in storage.kinds:
        gauges[f'storage_bytes{{kind="{kind.kind}"}}'] = float(kind.size_bytes)
        gauges[f'storage_checkpoints{{kind="{kind.kind}"}}'] = float(kind.num_checkpoints)
    return gauges


def _session_statuses(state: State) -> list[SessionStatus]:
    """Active sessions, and models without a session, most recently active first."""
    registry, now = state.registry, time.time()
    num_open = Counter(request.ticket.client for request in state.open.values())

    def is_gone(name: str, last_active: float, silence_s: float) -> bool:
        return not num_open[name] and now - last_active > silence_s

    def of_session(session: SessionRecord) -> SessionStatus:
        name, last_active = session.session_id, session.last_active
        return SessionStatus(
            name,
            [model.model_id for model in registry.models_of(name) if model.exists],
            num_open[name],
            session.created,
            last_active,
            is_gone(name, last_active, SESSION_SILENCE_S),
            session.display_name,
            session.user_metadata,
        )

    def of_model(model: ModelRecord) -> SessionStatus:
        name, last_active = model.model_id, model.last_active
        gone = is_gone(name, last_active, SESSIONLESS_SILENCE_S)
        return SessionStatus(
            name, [name], num_open[name], model.created, last_active, gone, None, model.create.user_metadata
        )

    shown = [of_session(session) for session in registry.sessions.values() if not session.is_finished]
    shown += [of_model(model) for model in registry.models.values() if model.session_id is None and model.exists]
    return sorted(shown, key=lambda status: status.last_active, reverse=True)


def _model_statuses(state: State) -> list[ModelStatus]:
    """The models that exist, most recently active first."""
    num_open = Counter(request.ticket.lane for request in state.open.values())
    models = [model for model in state.registry.models.values() if model.exists]
    models.sort(key=lambda model: model.last_active, reverse=True)
    return [_model_status(state, model, num_open[model.lane]) for model in models]


def _model_status(state: State, model: ModelRecord, num_requests: int) -> ModelStatus:
    progress, lora = state.progress.of(model.lane), model.lora
    is_absent = model.state == "ready" and model.workers != state.workers.incarnation
    return ModelStatus(
        model_id=model.model_id,
        session_id=model.session_id,
        state="absent" if is_absent else model.state,
        lora_rank=None if lora is None else lora.rank,
        num_steps=model.num_steps,
        num_requests=num_requests,
        created=model.created,
        last_active=model.last_active,
        last_step=progress.last_step,
        losses=list(progress.losses),
        grad_norm=progress.grad_norm,
        learning_rate=progress.learning_rate,
        user_metadata=model.create.user_metadata,
    )
