"""Searches sessions by their id, name, metadata and status."""

from __future__ import annotations

import time

from xorl.server.orchestrator.operation_properties import RESERVED_PREFIXES
from xorl.server.orchestrator.registry import SESSION_SILENCE_S, SessionRecord
from xorl.server.orchestrator.state import State
from xorl.server.queries import FoundSession, FoundSessions, SearchSessions


async def search_sessions(state: State, query: SearchSessions) -> FoundSessions:
    """One page of the sessions that match, newest first."""
    now = time.time()
    matching = [session for session in state.registry.sessions.values() if _matches(session, query, now)]
    matching.sort(key=_position, reverse=True)
    if query.before is not None:
        matching = [session for session in matching if _position(session) < query.before]
    num_checkpoints = _count_checkpoints(state)
    page = [
        FoundSession(
            session.session_id,
            _position(session)[0],
            _status(session, now),
            sum(num_checkpoints.get(model.model_id, 0) for model in state.registry.models_of(session.session_id)),
            session.display_name,
            session.user_metadata,
        )
        for session in matching[: query.limit]
    ]
    return FoundSessions(page, has_more=len(matching) > len(page))


def _matches(session: SessionRecord, query: SearchSessions, now: float) -> bool:
    if query.session_id is not None or query.display_name is not None:
        words = (query.display_name or "").lower().split()
        is_named = bool(words) and all(word in (session.display_name or "").lower() for word in words)
        if session.session_id != query.session_id and not is_named:
            return False
    if any(session.user_metadata.get(key) != value for key, value in query.user_metadata.items()):
        return False
    return query.statuses is None or _status(session, now) in query.statuses


def _status(session: SessionRecord, now: float) -> str | None:
    """The reason for which its client finished it; else active, or None if its client has gone silent."""
    if session.is_finished:
        return session.finish_reason
    return "active" if now - session.last_active <= SESSION_SILENCE_S else None


def _position(session: SessionRecord) -> tuple[float, str]:
    """Its position in the order of creation. Clients return it as a date, with microseconds."""
    return round(session.created, 6), session.session_id


def _count_checkpoints(state: State) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in state.registry.checkpoints.values():
        if not record.checkpoint.name.startswith(RESERVED_PREFIXES):
            counts[record.checkpoint.model_id] = counts.get(record.checkpoint.model_id, 0) + 1
    return counts
