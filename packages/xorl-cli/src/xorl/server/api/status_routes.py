"""Routes for the service's status: the status page, its data, and metrics for Prometheus."""

from __future__ import annotations

import re
from importlib.resources import files

from fastapi import APIRouter
from msgspec import to_builtins
from prometheus_client import generate_latest
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from xorl.server.api.context import api_of
from xorl.server.api.control_routes import iso
from xorl.server.api.responses import JSON, Refusal, json_response
from xorl.server.queries import GetStatus, Status, Storage

router = APIRouter()

_PAGE = files("xorl.server.api").joinpath("status.html").read_text(encoding="utf-8")
# The page may not load anything from elsewhere, and other pages may not embed it.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_METRIC = re.compile(r"[a-z_][a-z0-9_]*(\{[^\n{}]*\})?")


@router.get("/")
async def status_page() -> Response:
    """Return the status page. It contains no data: it fetches status.json with the token."""
    return HTMLResponse(_PAGE, headers=_PAGE_HEADERS)


@router.get("/status.json")
async def status_json(request: Request) -> Response:
    """Return the data of the status page."""
    api = api_of(request)
    status = await api.orchestrator.ask(GetStatus(), Status)
    info = await api.orchestrator.info()
    return json_response(
        {
            "model_name": info.model_name,
            "enable_lora": info.enable_lora,
            "started": iso(status.started),
            "ready": status.ready,
            "workers_connected": status.workers_connected,
            "world_size": status.world_size,
            "queue_depth": status.queue_depth,
            "running": [to_builtins(call) | {"since": iso(call.since)} for call in status.running],
            "processes": [
                {
                    "name": process.name,
                    "num_restarts": process.num_restarts,
                    "last_restart": _iso(process.last_restart),
                    "reason": process.reason,
                    "hung_since": _iso(process.hung_since),
                }
                for process in status.processes
            ],
            "tokens_per_second": status.tokens_per_second,
            "sessions": [
                {
                    "session_id": session.session_id,
                    "models": session.models,
                    "num_requests": session.num_requests,
                    "last_active": iso(session.last_active),
                    "is_gone": session.is_gone,
                }
                for session in status.sessions
            ],
            "gpu_bytes_used": status.gpu_bytes_used,
            "gpu_bytes_total": status.gpu_bytes_total,
            "last_errors": [
                {
                    "time": iso(error.time),
                    "model_id": error.model_id,
                    "operation": error.operation,
                    "message": error.message,
                }
                for error in status.last_errors
            ],
            "counters": status.counters,
            "gauges": status.gauges,
            "storage": None if status.storage is None else _storage_json(status.storage),
        }
    )


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics of this process and, if it answers, of the orchestrator."""
    api = api_of(request)
    lines: list[str] = []
    try:
        status = await api.orchestrator.ask(GetStatus(), Status, timeout_s=5.0)
    except Refusal:
        lines.append("xorl_orchestrator_up 0")
    else:
        lines.append("xorl_orchestrator_up 1")
        lines += [*_lines(status.counters, "counter"), *_lines(status.gauges, "gauge")]
    process_metrics = generate_latest(api.metrics.registry).decode()
    return Response(process_metrics + "\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else iso(seconds)


def _storage_json(storage: Storage) -> JSON:
    return {
        "limit_bytes": storage.limit_bytes,
        "used_bytes": storage.used_bytes,
        "kinds": [
            {"kind": kind.kind, "num_checkpoints": kind.num_checkpoints, "size_bytes": kind.size_bytes}
            for kind in storage.kinds
        ],
    }


def _lines(values: dict[str, float], kind: str) -> list[str]:
    """The values in Prometheus's text format, with a TYPE line before the first value of each name."""
    lines: list[str] = []
    seen: set[str] = set()
    for label, value in sorted(values.items()):
        if not _METRIC.fullmatch(label):
            continue
        name = f"xorl_{label.partition('{')[0]}"
        if name not in seen:
            seen.add(name)
            lines.append(f"# TYPE {name} {kind}")
        lines.append(f"xorl_{label} {value!r}")
    return lines
