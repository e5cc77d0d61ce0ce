"""The ASGI application: the routes behind the gate, and the handlers of errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from xorl.server.api import (
    checkpoint_routes,
    control_routes,
    endpoint_routes,
    future_routes,
    sampling_routes,
    status_routes,
    training_routes,
    unsupported_routes,
)
from xorl.server.api.context import Api
from xorl.server.api.gate import ApiMetrics, BodyReader, Gate
from xorl.server.api.orchestrator_client import OrchestratorClient
from xorl.server.api.refusal import Refusal
from xorl.server.api.settings import ApiSettings
from xorl.server.api.text import TextCoder

logger = logging.getLogger(__name__)

MAX_CONCURRENT_READS = 2

# Most frequently called first, since routes are tried in order; the last one matches every remaining POST.
ROUTERS = (
    future_routes.router,
    training_routes.router,
    sampling_routes.router,
    control_routes.router,
    checkpoint_routes.router,
    checkpoint_routes.files_router,
    endpoint_routes.router,
    status_routes.router,
    unsupported_routes.router,
)


def create_app(settings: ApiSettings) -> ASGIApp:
    """The ASGI application; it connects to the orchestrator at startup."""
    metrics = ApiMetrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        orchestrator = OrchestratorClient(settings)
        await orchestrator.start()
        reading = asyncio.Semaphore(MAX_CONCURRENT_READS)
        app.state.api = Api(settings, orchestrator, BodyReader(settings, metrics), metrics, TextCoder(), reading)
        try:
            yield
        finally:
            # An open socket would keep the process from exiting.
            await orchestrator.close()

    app = FastAPI(title="xorl", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(RequestValidationError, _unread)
    app.add_exception_handler(Exception, _failed)
    return Gate(app, settings, metrics)


async def _refused(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, Refusal)
    if problem.status >= 500:
        logger.warning("event=request_refused path=%s status=%d why=%r", request.url.path, problem.status, str(problem))
    return problem.response()


async def _no_route(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    # The catch-all route for POST turns other methods on unknown paths into a 405.
    if problem.status_code in (404, 405):
        return Refusal(404, f"this service has no {request.method} {request.url.path[:200]}").response()
    return Refusal(problem.status_code, str(problem.detail)).response()


async def _unread(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, RequestValidationError)
    # Concerns parameters of the URL only; bodies are decoded elsewhere.
    reasons: list[str] = []
    for error in problem.errors():
        given = "" if error["type"] == "missing" else f", got {str(error['input'])[:100]!r}"
        reasons.append(f"{error['loc'][-1]}: {error['msg']}{given}")
    return Refusal(422, "; ".join(reasons)).response()


async def _failed(request: Request, problem: Exception) -> Response:
    # The traceback goes to the log only. Clients retry a poll that fails with 5xx forever, so a poll gets 400.
    logger.error("event=request_failed path=%s", request.url.path, exc_info=problem)
    status = 400 if request.url.path.endswith("/retrieve_future") else 500
    return Refusal(status, "the service failed on this request, see its log").response()
