"""Routes for the service's status: the status page, its data, and metrics for Prometheus."""

from __future__ import annotations

import re
import time
from importlib.resources import files
from typing import cast

from fastapi import APIRouter
from msgspec import to_builtins
from prometheus_client import generate_latest
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from xorl.server.api.context import api_of
from xorl.server.api.control_routes import iso
from xorl.server.api.endpoint_routes import endpoint_json
from xorl.server.api.responses import JSON, Refusal, json_response
from xorl.server.operations import Message
from xorl.server.status_queries import GetStatus, Status, Storage

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
            "time": iso(time.time()),
            "started": iso(status.started),
            "ready": status.ready,
            "workers_connected": status.workers_connected,
            "world_size": status.world_size,
            "queue_depth": status.queue_depth,
            "running": [_json(call, "since") for call in status.running],
            "waiting": [_json(call) for call in status.waiting],
            "processes": [_json(process, "last_restart", "hung_since") for process in status.processes],
            "tokens_per_second": status.tokens_per_second,
            "token_rates": status.token_rates,
            "sessions": [_json(session, "created", "last_active") for session in status.sessions],
            "models": [_json(model, "created", "last_active", "last_step") for model in status.models],
            "endpoints": [endpoint_json(endpoint) for endpoint in status.endpoints],
            "gpu_bytes_used": status.gpu_bytes_used,
            "gpu_bytes_total": status.gpu_bytes_total,
            "last_errors": [_json(error, "time") for error in status.last_errors],
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


def _json(message: Message, *times: str) -> dict[str, JSON]:
    """The fields of a message, with the fields named in `times` in ISO 8601."""
    fields: dict[str, JSON] = to_builtins(message)
    del fields["type"]
    for name in times:
        seconds = fields[name]
        fields[name] = None if seconds is None else iso(cast("float", seconds))
    return fields


def _storage_json(storage: Storage) -> JSON:
    return {
        "limit_bytes": storage.limit_bytes,
        "used_bytes": storage.used_bytes,
        "kinds": [_json(kind) for kind in storage.kinds],
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
