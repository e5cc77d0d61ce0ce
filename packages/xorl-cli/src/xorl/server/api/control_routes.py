"""Routes for sessions, capabilities, health, and the configuration of clients."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from xorl.server.api.context import api_of
from xorl.server.api.gate import SMALL_BYTES
from xorl.server.api.model_bodies import metadata
from xorl.server.api.responses import JSON, Refusal, json_response, refuse_invalid
from xorl.server.identifiers import check_model_id
from xorl.server.messages import Ok
from xorl.server.queries import (
    CreateSession,
    FinishSession,
    GetSession,
    Heartbeat,
    ListSessions,
    SessionCreated,
    SessionInfo,
    Sessions,
)
from xorl.server.status_queries import GetStatus, Status

router = APIRouter()

_CHUNK_BYTES = 32 * 2**20
# Health checks must be answered quickly even without an orchestrator.
_HEALTH_TIMEOUT_S = 1.0
# The latest time that `datetime` can represent.
_LAST_TIME_S = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


class SessionBody(msgspec.Struct, frozen=True):
    """The body of /create_session and /session_heartbeat."""

    session_id: str | None = None
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    sdk_version: str | None = None
    project_id: str | None = None


class FinishReason(msgspec.Struct, frozen=True):
    """The reason why a session is finished."""

    type: str = "success"


class FinishBody(msgspec.Struct, frozen=True):
    """The body of /sessions/{id}/finish."""

    reason: FinishReason = FinishReason()
    detail: str | None = None


@router.post("/api/v1/client/config")
async def client_config(request: Request) -> Response:
    """Tell a client how to split its data: large uncompressed bodies, since client and service share a network."""
    limit = api_of(request).settings.body_bytes
    chunk_bytes = min(_CHUNK_BYTES, limit // 4)
    return json_response(
        {
            "pjwt_auth_enabled": False,
            "proto_compress_fwdbwd": False,
            "fwdbwd_max_chunk_len": 4096,
            "fwdbwd_max_chunk_bytes_count": chunk_bytes,
            "fwdbwd_dispatch_bytes_semaphore_size": 4 * chunk_bytes,
            "custom_loss_server_side": False,
        }
    )


@router.post("/api/v1/client/dynamic_config")
async def client_dynamic_config() -> Response:
    """Return the settings that a client refreshes periodically."""
    return json_response({"refresh_interval_sec": 300, "sample_cancel_enabled": True})


@router.post("/api/v1/create_session")
async def create_session(request: Request) -> Response:
    """Create a session."""
    api = api_of(request)
    given = await api.bodies.parse(request, SessionBody)
    if given.project_id is not None:
        raise Refusal(400, "project_id: this service has no projects; leave it out")
    with refuse_invalid():
        query = CreateSession(
            None if given.session_id is None else check_model_id(given.session_id),
            tags=tuple(given.tags),
            user_metadata=metadata(given.user_metadata),
            display_name=given.display_name,
        )
    created = await api.orchestrator.ask(query, SessionCreated)
    return json_response(
        {
            "type": "create_session",
            "session_id": created.session_id,
            "info_message": created.info_message,
            "warning_message": None,
            "error_message": None,
        }
    )


@router.post("/api/v1/session_heartbeat")
async def session_heartbeat(request: Request) -> Response:
    """Keep a session alive."""
    api = api_of(request)
    given = await api.bodies.parse(request, SessionBody)
    await api.orchestrator.ask(Heartbeat(given.session_id or "default"), Ok)
    return json_response({"type": "session_heartbeat", "session_id": given.session_id})


@router.post("/api/v1/sessions/{session_id}/finish")
async def finish_session(request: Request, session_id: str) -> Response:
    """Finish a session."""
    api = api_of(request)
    given = await api.bodies.parse(request, FinishBody)
    await api.orchestrator.ask(FinishSession(session_id, given.reason.type), Ok)
    return Response(status_code=204)


@router.get("/api/v1/sessions")
async def list_sessions(request: Request, limit: int = 20, offset: int = 0) -> Response:
    """List the ids of sessions, newest first."""
    listed = await api_of(request).orchestrator.ask(ListSessions(*page(limit, offset)), Sessions)
    return json_response(
        {
            "sessions": [session.session_id for session in listed.sessions],
            "cursor": {"offset": offset, "limit": limit, "total_count": listed.total},
        }
    )


@router.get("/api/v1/sessions/{session_id}")
async def get_session(request: Request, session_id: str) -> Response:
    """Describe a session and list its models and samplers."""
    session = await api_of(request).orchestrator.ask(GetSession(session_id), SessionInfo)
    return json_response(
        {
            "training_run_ids": session.model_ids,
            "sampler_ids": session.sampler_ids,
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
            "created_at": iso(session.created),
            "is_finished": session.is_finished,
        }
    )


@router.get("/api/v1/session_info")
async def session_info(request: Request) -> Response:
    """List all active sessions and their models."""
    status = await api_of(request).orchestrator.ask(GetStatus(), Status)
    return json_response(
        {
            "registered_models": [model for session in status.sessions for model in session.models],
            "active_sessions": [session.session_id for session in status.sessions],
            "session_activity": {session.session_id: iso(session.last_active) for session in status.sessions},
        }
    )


@router.get("/api/v1/get_server_capabilities")
async def capabilities(request: Request) -> Response:
    """List the supported models: only the base model."""
    info = await api_of(request).orchestrator.info()
    model: JSON = {
        "model_name": info.model_name,
        "max_context_length": info.max_context_length,
        "trainable": True,
        "sampleable": True,
    }
    return json_response({"supported_models": [model]})


@router.post("/api/v1/telemetry")
async def telemetry(request: Request) -> Response:
    """Accept telemetry and discard it."""
    await api_of(request).bodies.read(request, SMALL_BYTES)
    return json_response({"status": "accepted"})


@router.get("/api/v1/healthz")
async def healthz(request: Request) -> Response:
    """Return whether the service is ready for calls."""
    if await _is_ready(request):
        return json_response({"status": "ok"})
    return json_response({"status": "not_ready"}, 503, {"retry-after": "1"})


@router.get("/health")
async def health(request: Request) -> Response:
    """Return the same as `healthz`, in xorl-client's format."""
    is_ready = await _is_ready(request)
    content = {"status": "healthy" if is_ready else "starting", "engine_running": is_ready}
    return json_response(content, 200 if is_ready else 503)


async def _is_ready(request: Request) -> bool:
    orchestrator = api_of(request).orchestrator
    await orchestrator.wait(_HEALTH_TIMEOUT_S)
    try:
        return orchestrator.is_connected and (await orchestrator.info()).ready
    except Refusal:
        return False


def iso(seconds: float) -> str:
    """A Unix time as ISO 8601 in UTC. Times after the year 9999, which `datetime` cannot represent, are clipped."""
    return datetime.fromtimestamp(min(seconds, _LAST_TIME_S), UTC).isoformat()


def page(limit: int, offset: int) -> tuple[int, int]:
    """(limit, offset), validated; raises Refusal(400)."""
    if not 0 <= limit <= 1000 or not offset >= 0:
        raise Refusal(400, f"limit must be 0 to 1000 and offset 0 or more, got {limit} and {offset}")
    return limit, offset
