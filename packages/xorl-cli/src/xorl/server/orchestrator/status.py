"""Service status, for the status page, `xorl serve status` and Prometheus."""

from __future__ import annotations

from xorl.server.orchestrator.state import State
from xorl.server.queries import GetService, GetStatus, ServiceInfo, SessionStatus, Status


async def get_service(state: State, query: GetService) -> ServiceInfo:
    """The served model and its settings."""
    options = state.options
    return ServiceInfo(
        model_name=options.model_name,
        tokenizer=options.tokenizer,
        arch=options.arch,
        max_context_length=state.workers.max_context_length,
        enable_lora=options.enable_lora,
        lora_rank=options.lora_rank if options.enable_lora else None,
        lora_alpha=options.lora_alpha if options.enable_lora else None,
        vocab_size=options.vocab_size,
        output_dir=options.output_dir,
        ready=state.workers.is_ready,
    )


async def get_status(state: State, query: GetStatus) -> Status:
    """The current status."""
    health, workers = state.workers.health, state.workers
    return Status(
        started=state.started,
        ready=workers.is_ready,
        workers_connected=workers.is_connected,
        world_size=health.world_size if health else 0,
        queue_depth=len(state.scheduler),
        running=[_described(state, name) for name, request in state.open.items() if request.is_running],
        tokens_per_second=state.counters.tokens_per_second(),
        sessions=_sessions(state),
        gpu_bytes_used=health.gpu_bytes_used if health else [],
        gpu_bytes_total=health.gpu_bytes_total if health else [],
        last_errors=list(state.counters.errors)[::-1],
        counters=dict(state.counters.totals),
        gauges={
            "queued_requests": float(len(state.scheduler)),
            "open_requests": float(len(state.open)),
            "models": float(sum(model.state == "ready" for model in state.registry.models.values())),
            "tokens_per_second": state.counters.tokens_per_second(),
            "journal_bytes": float(state.journal.size_bytes()),
            "workers_ready": float(workers.is_ready),
        },
    )


def _described(state: State, request_id: str) -> str:
    request = state.open[request_id]
    model = state.model_of(request.ticket)
    return request.kind if model is None else f"{request.kind} {model.model_id}"


def _sessions(state: State) -> list[SessionStatus]:
    """Active sessions, and models without a session, most recently active first."""
    registry = state.registry
    queued: dict[str, int] = {}
    for request in state.open.values():
        queued[request.ticket.client] = queued.get(request.ticket.client, 0) + 1
    shown = [
        SessionStatus(
            session.session_id,
            [model.model_id for model in registry.models_of(session.session_id) if model.exists],
            queued.get(session.session_id, 0),
            session.last_active,
        )
        for session in registry.sessions.values()
        if not session.is_finished
    ]
    shown += [
        SessionStatus(model.model_id, [model.model_id], queued.get(model.model_id, 0), model.last_active)
        for model in registry.models.values()
        if model.session_id is None and model.exists
    ]
    return sorted(shown, key=lambda status: status.last_active, reverse=True)
