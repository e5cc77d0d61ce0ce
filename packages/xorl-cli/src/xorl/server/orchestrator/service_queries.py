"""Answers queries about the service, its sessions, models and samplers; `status` answers those about the status."""

from __future__ import annotations

import secrets
import time

from xorl.server.identifiers import base_refusal, sampling_session_id_of
from xorl.server.messages import Ok, Rejected
from xorl.server.operations import LoraSpec
from xorl.server.orchestrator.operation_properties import export_refusal
from xorl.server.orchestrator.registry import (
    SamplerRecord,
    SessionRecord,
    stored,
)
from xorl.server.orchestrator.state import State
from xorl.server.queries import (
    CreateSamplingSession,
    CreateSession,
    FinishSession,
    GetModel,
    GetSampler,
    GetService,
    GetSession,
    Heartbeat,
    ListSessions,
    ModelInfo,
    SamplingSession,
    ServiceInfo,
    SessionCreated,
    SessionInfo,
    Sessions,
)


async def get_service(state: State, query: GetService) -> ServiceInfo:
    """The served model and its settings."""
    options = state.options
    return ServiceInfo(
        model_name=options.model_name,
        base_names=options.base_names,
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


async def create_session(state: State, query: CreateSession) -> SessionCreated | Rejected:
    """Begin a session. For a retry, return the existing session."""
    sessions = state.registry.sessions
    session_id = query.session_id or f"session-{secrets.token_hex(8)}"
    if session_id not in sessions:
        refusal = session_limit_refusal(state)
        if refusal is not None:
            return Rejected(429, refusal)
        now = time.time()
        record = SessionRecord(session_id, now, now, query.tags, query.user_metadata, query.display_name)
        sessions[session_id] = record
        await state.journal.put([stored(record)])
    message = None
    if not state.options.enable_lora:
        message = (
            f"This service trains the full weights of {state.options.model_name}, one model at a time; it ignores the "
            "rank that a client requests."
        )
    return SessionCreated(session_id, message)


def session_limit_refusal(state: State) -> str | None:
    """The refusal of a new session if max_sessions is reached. A model without a session counts as one."""
    registry, limit = state.registry, state.options.max_sessions
    # Clients that die do not end their session, so idle ones do not count.
    since = time.time() - state.options.idle_session_timeout_s
    num_open = sum(not one.is_finished and one.last_active > since for one in registry.sessions.values())
    num_open += sum(
        model.session_id is None and model.exists and model.last_active > since for model in registry.models.values()
    )
    if num_open < limit:
        return None
    return f"max_sessions: {num_open} are open, which is the limit: close some, or try again later"


async def heartbeat(state: State, query: Heartbeat) -> Ok | Rejected:
    """Keep a session, or a model without one, active."""
    record = state.registry.sessions.get(query.session_id) or state.registry.models.get(query.session_id)
    if record is None:
        return _no_session(query.session_id)
    if isinstance(record, SessionRecord) and record.is_finished:
        return Rejected(410, f"session {query.session_id} has ended")
    record.last_active = time.time()
    return Ok()


async def finish_session(state: State, query: FinishSession) -> Ok | Rejected:
    """End a session; housekeeping later releases its models."""
    session = state.registry.sessions.get(query.session_id)
    if session is None:
        return _no_session(query.session_id)
    session.is_finished, session.finish_reason, session.last_active = True, query.reason, time.time()
    await state.journal.put([stored(session)])
    return Ok()


async def get_session(state: State, query: GetSession) -> SessionInfo | Rejected:
    """A session with its models and samplers."""
    session = state.registry.sessions.get(query.session_id)
    return _session_info(state, session) if session else _no_session(query.session_id)


async def list_sessions(state: State, query: ListSessions) -> Sessions:
    """All sessions, newest first."""
    newest = sorted(state.registry.sessions.values(), key=lambda session: session.created, reverse=True)
    page = newest[query.offset : query.offset + query.limit]
    return Sessions([_session_info(state, session) for session in page], len(newest))


async def get_model(state: State, query: GetModel) -> ModelInfo | Rejected:
    """A model's properties, also if it is released, since its next request restores it."""
    model, options = state.registry.models.get(query.model_id), state.options
    if model is None or not model.exists or model.state == "creating":
        reason = "has not been created" if model is None or model.state == "creating" else f"is {model.state}"
        return Rejected(404, f"model {query.model_id} {reason}")
    lora = model.lora or model.create.lora or LoraSpec()
    return ModelInfo(
        model.model_id,
        options.model_name,
        options.arch,
        options.tokenizer,
        options.tokenizer_name,
        lora if options.enable_lora else None,
        model.num_steps,
        model.create.user_metadata,
    )


async def create_sampling_session(state: State, query: CreateSamplingSession) -> SamplingSession | Rejected:
    """Begin a sampling session. For a retry, return the existing one."""
    registry, options = state.registry, state.options
    sampling_session_id = query.sampling_session_id
    if sampling_session_id is None:
        sampling_session_id = sampling_session_id_of(f"session-{secrets.token_hex(8)}", 0)
    if query.session_id is not None and query.session_id not in registry.sessions:
        return _no_session(query.session_id)
    if (refusal := base_refusal(query.base_model, options.base_names, "samples from")) is not None:
        return Rejected(400, refusal)
    if query.checkpoint is not None and state.find_checkpoint(query.checkpoint) is None:
        return Rejected(404, f"there is no checkpoint {query.checkpoint.uri('xorl')}")
    if query.checkpoint is not None and (refusal := export_refusal(query.checkpoint)) is not None:
        return Rejected(400, refusal)
    record = registry.samplers.get(sampling_session_id)
    if record is None:
        name = None if query.checkpoint is None else query.checkpoint.name
        base = options.model_name
        record = SamplerRecord(sampling_session_id, query.session_id, base, time.time(), query.checkpoint, name=name)
        if query.checkpoint is not None and name is not None:
            refused = await state.inference.publish(query.checkpoint, name)
            if refused is not None:
                return refused
        registry.samplers[sampling_session_id] = record
        await state.journal.put([stored(record)])
    elif record.checkpoint != query.checkpoint:
        reason = "was created before with other weights: use a new number; a retry must send the same content"
        return Rejected(400, f"sampling session {sampling_session_id} {reason}")
    return _sampling_session(state, record)


async def get_sampler(state: State, query: GetSampler) -> SamplingSession | Rejected:
    """A sampling session and its weights."""
    record = state.registry.samplers.get(query.sampling_session_id)
    if record is None:
        return Rejected(404, f"there is no sampling session {query.sampling_session_id}")
    return _sampling_session(state, record)


def _no_session(session_id: str) -> Rejected:
    return Rejected(404, f"there is no session {session_id}")


def _session_info(state: State, session: SessionRecord) -> SessionInfo:
    samplers = [s.sampling_session_id for s in state.registry.samplers.values() if s.session_id == session.session_id]
    return SessionInfo(
        session.session_id,
        session.created,
        session.last_active,
        [m.model_id for m in state.registry.models_of(session.session_id) if m.state not in ("creating", "failed")],
        samplers,
        session.tags,
        session.user_metadata,
        session.display_name,
        session.is_finished,
    )


def _sampling_session(state: State, record: SamplerRecord) -> SamplingSession:
    is_of_this_base = record.base_model == state.options.model_name
    base = state.options.tokenizer_name if is_of_this_base else record.base_model
    return SamplingSession(record.sampling_session_id, base, record.checkpoint, record.name)
