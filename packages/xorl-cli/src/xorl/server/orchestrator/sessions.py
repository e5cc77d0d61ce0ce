"""Sessions, models and samplers as clients ask for them: begun, looked at, ended."""

from __future__ import annotations

import secrets
import time

from xorl.server.identifiers import sampling_session_id_of
from xorl.server.messages import Ok, Rejected
from xorl.server.operations import LoraSpec
from xorl.server.orchestrator import checkpoint_queries
from xorl.server.orchestrator.registry import ModelRecord, SamplerRecord, SessionRecord, stored
from xorl.server.orchestrator.state import State
from xorl.server.queries import (
    CreateSamplingSession,
    CreateSession,
    FinishSession,
    GetModel,
    GetSampler,
    GetSession,
    Heartbeat,
    ListSessions,
    ModelInfo,
    SamplingSession,
    SessionCreated,
    SessionInfo,
    Sessions,
)


async def create_session(state: State, ask: CreateSession) -> SessionCreated | Rejected:
    """Begin a session; one that is there already is answered as it was, for a retry."""
    sessions = state.registry.sessions
    session_id = ask.session_id or f"session-{secrets.token_hex(8)}"
    if session_id not in sessions:
        why = too_many(state)
        if why is not None:
            return Rejected(429, why)
        now = time.time()
        record = SessionRecord(session_id, now, now, ask.tags, ask.user_metadata, ask.display_name)
        sessions[session_id] = record
        await state.journal.put([stored(record)])
    return SessionCreated(session_id, _welcome(state))


def too_many(state: State) -> str | None:
    """Why nobody else can begin, None where they can. A model without a session counts as a session of its own."""
    registry, limit = state.registry, state.options.max_sessions
    # Clients that die end nothing; what has been idle does not count.
    since = time.time() - state.options.idle_session_timeout_s
    num_open = sum(not one.is_finished and one.last_active > since for one in registry.sessions.values())
    alone = (model for model in registry.models.values() if model.session_id is None and model.is_there)
    num_open += sum(model.last_active > since for model in alone)
    if num_open < limit:
        return None
    return f"max_sessions: {num_open} are open, and no more are taken: close some, or wait"


async def heartbeat(state: State, ask: Heartbeat) -> Ok | Rejected:
    """A session is in use, or a model without one."""
    record = state.registry.sessions.get(ask.session_id) or state.registry.models.get(ask.session_id)
    if record is None:
        return Rejected(404, f"there is no session {ask.session_id}")
    if isinstance(record, SessionRecord) and record.is_finished:
        return Rejected(410, f"session {ask.session_id} has ended")
    record.last_active = time.time()
    return Ok()


async def finish_session(state: State, ask: FinishSession) -> Ok | Rejected:
    """The client has ended a session; its models are released by the clock."""
    session = state.registry.sessions.get(ask.session_id)
    if session is None:
        return Rejected(404, f"there is no session {ask.session_id}")
    session.is_finished, session.last_active = True, time.time()
    await state.journal.put([stored(session)])
    return Ok()


async def get_session(state: State, ask: GetSession) -> SessionInfo | Rejected:
    """What there is to know of a session."""
    session = state.registry.sessions.get(ask.session_id)
    return _session(state, session) if session else Rejected(404, f"there is no session {ask.session_id}")


async def list_sessions(state: State, ask: ListSessions) -> Sessions:
    """Newest first."""
    newest = sorted(state.registry.sessions.values(), key=lambda session: session.created, reverse=True)
    page = newest[ask.offset : ask.offset + ask.limit]
    return Sessions([_session(state, session) for session in page], len(newest))


async def get_model(state: State, ask: GetModel) -> ModelInfo | Rejected:
    """What a model is. One that was released is there: it comes back when it is called."""
    model, options = state.registry.models.get(ask.model_id), state.options
    if model is None or not model.is_there or model.state == "creating":
        why = "has not been created" if model is None or model.state == "creating" else f"is {model.state}"
        return Rejected(404, f"model {ask.model_id} {why}")
    lora = _lora(model) if options.enable_lora else None
    return ModelInfo(
        model.model_id,
        options.model_name,
        options.arch,
        options.tokenizer,
        lora,
        model.num_steps,
        model.create.user_metadata,
    )


async def create_sampling_session(state: State, ask: CreateSamplingSession) -> SamplingSession | Rejected:
    """Begin to sample; one that is there already is answered as it was, for a retry."""
    registry, options = state.registry, state.options
    sampling_session_id = ask.sampling_session_id
    if sampling_session_id is None:
        sampling_session_id = sampling_session_id_of(f"session-{secrets.token_hex(8)}", 0)
    if ask.session_id is not None and ask.session_id not in registry.sessions:
        return Rejected(404, f"there is no session {ask.session_id}")
    if ask.base_model not in (None, options.model_name, options.model_path):
        return Rejected(400, f"this service samples from {options.model_name}, and not from {ask.base_model!r}")
    if ask.checkpoint is not None and checkpoint_queries.find(state, ask.checkpoint) is None:
        return Rejected(404, f"there is no checkpoint {ask.checkpoint.uri('xorl')}")
    record = registry.samplers.get(sampling_session_id)
    if record is None:
        name = None if ask.checkpoint is None else ask.checkpoint.name
        base = options.model_name
        record = SamplerRecord(sampling_session_id, ask.session_id, base, time.time(), ask.checkpoint, name=name)
        if ask.checkpoint is not None and name is not None:
            refused = await state.inference.publish(ask.checkpoint, name)
            if refused is not None:
                return refused
        registry.samplers[sampling_session_id] = record
        await state.journal.put([stored(record)])
    elif record.snapshot_of is not None or record.checkpoint != ask.checkpoint:
        why = "was begun before with other weights: a number is used once, a retry sends the same"
        return Rejected(400, f"sampling session {sampling_session_id} {why}")
    return _sampler(record)


async def get_sampler(state: State, ask: GetSampler) -> SamplingSession | Rejected:
    """What a sampling session samples from."""
    record = state.registry.samplers.get(ask.sampling_session_id)
    return _sampler(record) if record else Rejected(404, f"there is no sampling session {ask.sampling_session_id}")


def _session(state: State, session: SessionRecord) -> SessionInfo:
    samplers = [s.sampling_session_id for s in state.registry.samplers.values() if s.session_id == session.session_id]
    return SessionInfo(
        session.session_id,
        session.created,
        session.last_active,
        [model.model_id for model in state.registry.models_of(session.session_id)],
        samplers,
        session.tags,
        session.user_metadata,
        session.display_name,
        session.is_finished,
    )


def _sampler(record: SamplerRecord) -> SamplingSession:
    return SamplingSession(record.sampling_session_id, record.base_model, record.checkpoint, record.name)


def _lora(model: ModelRecord) -> LoraSpec:
    return model.lora or model.create.lora or LoraSpec()


def _welcome(state: State) -> str | None:
    if state.options.enable_lora:
        return None
    return (
        f"This service trains the full weights of {state.options.model_name}, one model at a time; the rank that a "
        "client asks for is not used."
    )
