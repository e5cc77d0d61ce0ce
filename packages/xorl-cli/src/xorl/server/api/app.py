"""The ASGI application: the routes behind the gate, error handlers, and the routes that refuse unsupported calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from xorl.host.alive import AliveFile
from xorl.server.api import (
    checkpoint_routes,
    control_routes,
    endpoint_routes,
    future_routes,
    openai_response_routes,
    openai_routes,
    sampling_routes,
    search_routes,
    status_routes,
    training_routes,
)
from xorl.server.api.context import Api, ApiSettings, OrderedOperation, future_response
from xorl.server.api.gate import ApiMetrics, BodyReader, Gate
from xorl.server.api.openai_responses import Conversations
from xorl.server.api.orchestrator_client import OrchestratorClient
from xorl.server.api.responses import Refusal
from xorl.server.api.text import TextCoder
from xorl.server.memory import return_freed_memory
from xorl.server.queries import ServiceInfo

logger = logging.getLogger(__name__)

MAX_CONCURRENT_DECODES = 2
CLIENT_LEFT = 499

unsupported = APIRouter(prefix="/api/v1")

# Most frequently called first, since routes are tried in order; the last one matches every remaining POST.
ROUTERS = (
    future_routes.router,
    training_routes.router,
    sampling_routes.router,
    openai_routes.router,
    openai_response_routes.router,
    control_routes.router,
    search_routes.router,
    checkpoint_routes.router,
    checkpoint_routes.files_router,
    endpoint_routes.router,
    status_routes.router,
    unsupported,
)


def create_app(settings: ApiSettings) -> ASGIApp:
    """The ASGI application; it connects to the orchestrator at startup."""
    metrics = ApiMetrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        orchestrator = OrchestratorClient(settings.orchestrator, settings.patience_s)
        await orchestrator.start()
        bodies = BodyReader(settings.body_bytes, settings.bytes_in_flight, metrics)
        decode_slots = asyncio.Semaphore(MAX_CONCURRENT_DECODES)
        signs = settings.signs
        trimming = asyncio.create_task(return_freed_memory())
        alive = None if signs is None else asyncio.create_task(AliveFile(signs / "API").keep_touching())
        app.state.api = Api(settings, orchestrator, bodies, metrics, TextCoder(), Conversations(), decode_slots)
        try:
            yield
        finally:
            # An open socket would keep the process from exiting.
            await orchestrator.close()
            trimming.cancel()
            if alive is not None:
                alive.cancel()

    app = FastAPI(title="xorl", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(Refusal, _on_refusal)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_parameters)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected_error)
    return Gate(app, settings.token, settings.host, metrics)


@unsupported.post("/update_dedicated_endpoint")
@unsupported.post("/update_serverless_weights")
async def update_hosted_weights(request: Request) -> Response:
    """Refuse to update a vendor's inference servers."""
    path = request.url.path.rpartition("/")[2]
    reason = (
        f"{path}: this service does not host models elsewhere; sample from the service itself, or from your own "
        "inference server with add_inference_endpoint and sync_inference_weights"
    )
    return await _refuse(request, Refusal(400, reason))


_NOT_SERVED = {
    "copy_weights": "this service has no projects to copy weights between; every client can train and sample from any "
    "checkpoint by its path, and PUT .../ttl keeps it longer",
    "publish": "every client of this service can already read any checkpoint by its path, so none can be published or "
    "made private",
    "project": "this service has no projects",
    "trace_export": "this service records no traces; see its log and /metrics",
    "create_custom_loss": "forward_backward_custom computes a loss in the client; this service runs no graphs",
    "join_sampling_session": "sampling sessions here do not count their clients; a clone samples without it",
}


@unsupported.post("/copy_weights")
@unsupported.post("/create_custom_loss")
@unsupported.post("/join_sampling_session")
@unsupported.api_route("/training_runs/{model_id}/checkpoints/{kind}/{name}/publish", methods=["POST", "DELETE"])
@unsupported.put("/sessions/{session_id}/project")
@unsupported.get("/sessions/{session_id}/trace_export")
async def not_served(request: Request) -> Response:
    """Refuse a call of the clients that has no meaning here."""
    path = request.url.path.rpartition("/")[2]
    return await _refuse(request, Refusal(400, f"{path}: {_NOT_SERVED[path]}"))


@unsupported.post("/{path:path}")
async def unknown(request: Request) -> Response:
    """Refuse every POST that no other route matches."""
    return await _refuse(request, Refusal(404, f"this service has no POST {request.url.path[:200]}"))


async def _refuse(request: Request, refusal: Refusal) -> Response:
    """Refuse a call. Through `future_response`, so that the seq_id in its body, if any, is skipped."""

    def read(body: bytes, info: ServiceInfo) -> OrderedOperation:
        raise refusal

    return await future_response(request, read)


async def _on_refusal(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, Refusal)
    if problem.status >= 500:
        logger.warning("event=request_refused path=%s status=%d why=%r", request.url.path, problem.status, str(problem))
    return problem.response(request.url.path)


async def _on_http_error(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    # The catch-all route for POST turns other methods on unknown paths into a 405.
    if problem.status_code in (404, 405):
        return Refusal(404, f"this service has no {request.method} {request.url.path[:200]}").response(request.url.path)
    return Refusal(problem.status_code, str(problem.detail)).response()


async def _on_invalid_parameters(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, RequestValidationError)
    # Only for parameters of the URL; bodies are decoded elsewhere.
    reasons: list[str] = []
    for error in problem.errors():
        given = "" if error["type"] == "missing" else f", got {str(error['input'])[:100]!r}"
        reasons.append(f"{error['loc'][-1]}: {error['msg']}{given}")
    return Refusal(422, "; ".join(reasons)).response()


async def _on_disconnect(request: Request, problem: Exception) -> Response:
    # Nobody receives this. The metrics count it under nginx's status for a client that disconnected early.
    return Response(status_code=CLIENT_LEFT)


async def _on_unexpected_error(request: Request, problem: Exception) -> Response:
    # The traceback goes to the log only. Clients retry a poll that fails with 5xx forever, so a poll gets 400.
    logger.error("event=request_failed path=%s", request.url.path, exc_info=problem)
    status = 400 if request.url.path.endswith("/retrieve_future") else 500
    return Refusal(status, "the service failed on this request, see its log").response(request.url.path)
