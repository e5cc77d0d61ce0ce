"""The application: routes behind the gate, and how errors leave it."""

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
    unserved_routes,
)
from xorl.server.api.context import Api
from xorl.server.api.gate import Bodies, Gate, Measures
from xorl.server.api.orchestrator_client import OrchestratorClient
from xorl.server.api.refusal import Refusal
from xorl.server.api.settings import ApiSettings
from xorl.server.api.text import TextCoder

logger = logging.getLogger(__name__)

READING_AT_ONCE = 2

# Those that are called most come first, since routes are tried in order; the last one takes whatever is left.
ROUTERS = (
    future_routes.router,
    training_routes.router,
    sampling_routes.router,
    control_routes.router,
    checkpoint_routes.router,
    checkpoint_routes.files_router,
    endpoint_routes.router,
    status_routes.router,
    unserved_routes.router,
)


def create_app(settings: ApiSettings) -> ASGIApp:
    """The application that a server of ASGI runs; it connects to the orchestrator when it starts."""
    measures = Measures()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        orchestrator = OrchestratorClient(settings)
        await orchestrator.start()
        reading = asyncio.Semaphore(READING_AT_ONCE)
        app.state.api = Api(settings, orchestrator, Bodies(settings, measures), measures, TextCoder(), reading)
        try:
            yield
        finally:
            # Its socket would keep the process from ending.
            await orchestrator.close()

    app = FastAPI(title="xorl", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(RequestValidationError, _unread)
    app.add_exception_handler(Exception, _failed)
    return Gate(app, settings, measures)


async def _refused(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, Refusal)
    if problem.status >= 500:
        logger.warning("event=request_refused path=%s status=%d why=%r", request.url.path, problem.status, str(problem))
    return problem.response()


async def _no_route(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    # The route that takes every unknown POST makes a 405 of any other method there.
    if problem.status_code in (404, 405):
        return Refusal(404, f"this service has no {request.method} {request.url.path[:200]}").response()
    return Refusal(problem.status_code, str(problem.detail)).response()


async def _unread(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, RequestValidationError)
    # Bodies are read elsewhere; this is of what stands in the URL.
    said: list[str] = []
    for error in problem.errors():
        given = "" if error["type"] == "missing" else f", got {str(error['input'])[:100]!r}"
        said.append(f"{error['loc'][-1]}: {error['msg']}{given}")
    return Refusal(422, "; ".join(said)).response()


async def _failed(request: Request, problem: Exception) -> Response:
    # A client polls at once after a 5xx, without end; and what went wrong here is no one's to read but the log's.
    logger.error("event=request_failed path=%s", request.url.path, exc_info=problem)
    status = 400 if request.url.path.endswith("/retrieve_future") else 500
    return Refusal(status, "the service failed on this request, see its log").response()
