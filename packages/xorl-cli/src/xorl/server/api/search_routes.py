"""The route that searches sessions. Sessions have no owners and no projects here: every client sees all."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from xorl.server.api.context import api_of
from xorl.server.api.control_routes import iso
from xorl.server.api.responses import JSON, Refusal, json_response
from xorl.server.queries import FoundSession, FoundSessions, SearchSessions

router = APIRouter()

_REASONS = ("success", "errored", "interrupted")
_MAX_PAGE = 200


class StatusQuery(msgspec.Struct, frozen=True):
    """A status to match. reasons: those of client_finished; None matches all."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = None


class Cursor(msgspec.Struct, frozen=True):
    """The last session of the page before."""

    last_created_at: datetime
    last_session_id: str


class SearchBody(msgspec.Struct, frozen=True):
    """The body of /sessions/search."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    owner: dict[str, Any] = {}
    statuses: list[StatusQuery] | None = None
    limit: int = 50
    cursor: Cursor | None = None


@router.post("/api/v1/sessions/search")
async def search_sessions(request: Request) -> Response:
    """Return a page of the sessions that match, newest first."""
    api = api_of(request)
    given = await api.bodies.parse(request, SearchBody)
    if given.project_ids is not None:
        raise Refusal(400, "project_ids: this service has no projects, leave it out")
    if given.owner.get("type") == "user":
        raise Refusal(400, "owner: this service has no users, search with owner own or accessible")
    if not 1 <= given.limit <= _MAX_PAGE:
        raise Refusal(400, f"limit must be 1 to {_MAX_PAGE}, got {given.limit}")
    cursor = given.cursor
    query = SearchSessions(
        given.limit,
        given.session_id,
        given.display_name,
        given.user_metadata,
        None if given.statuses is None else tuple(reason for one in given.statuses for reason in _statuses(one)),
        None if cursor is None else (round(cursor.last_created_at.timestamp(), 6), cursor.last_session_id),
    )
    found = await api.orchestrator.ask(query, FoundSessions)
    last = found.sessions[-1] if found.has_more and found.sessions else None
    return json_response(
        {
            "sessions": [_session_json(session) for session in found.sessions],
            "next_cursor": None
            if last is None
            else {"last_created_at": iso(last.created), "last_session_id": last.session_id},
        }
    )


def _statuses(query: StatusQuery) -> tuple[str, ...]:
    """The statuses of `FoundSession` that it matches. Sessions here are never cancelled or failed."""
    if query.type == "client_finished":
        return tuple(_REASONS if query.reasons is None else query.reasons)
    return ("active",) if query.type == "active" else ()


def _session_json(session: FoundSession) -> JSON:
    status: JSON = None
    if session.status == "active":
        status = {"type": "active"}
    elif session.status is not None:
        status = {"type": "client_finished", "reason": {"type": session.status}}
    return {
        "session_id": session.session_id,
        "created_at": iso(session.created),
        "owner": "local",
        "project_id": "",
        "status": status,
        "checkpoints_count": session.num_checkpoints,
        "display_name": session.display_name,
        "user_metadata": session.user_metadata,
    }
