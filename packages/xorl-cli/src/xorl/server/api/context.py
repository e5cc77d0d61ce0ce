"""Shared by the routes: the parts of the process, the dialect of a request, and submitting operations in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from xorl.server.api.gate import ApiMetrics, BodyReader
from xorl.server.api.orchestrator_client import OrchestratorClient
from xorl.server.api.refusal import Refusal
from xorl.server.api.reply import json_response
from xorl.server.api.sequence import sequence_of
from xorl.server.api.settings import ApiSettings
from xorl.server.api.tensors import ByteBudget
from xorl.server.api.text import TextCoder
from xorl.server.identifiers import Dialect
from xorl.server.operations import ModelOperation, Sample
from xorl.server.queries import ServiceInfo

# Longer bodies are decoded in a thread; for shorter ones a thread costs more than it saves.
_THREAD_BYTES = 2**18


@dataclass(frozen=True)
class Api:
    """The parts of the process. reading: limits how many long bodies are decoded at once, which bounds the memory."""

    settings: ApiSettings
    orchestrator: OrchestratorClient
    bodies: BodyReader
    metrics: ApiMetrics
    text: TextCoder
    reading: asyncio.Semaphore

    def tensor_budget(self) -> ByteBudget:
        """The memory that the tensors of one request may take."""
        return ByteBudget(self.settings.body_bytes)


@dataclass(frozen=True)
class OrderedOperation:
    """An operation with its place in the order of its model's calls; see Submit for the fields."""

    operation: ModelOperation | Sample
    key: str | None = None
    seq_id: int | None = None
    session_id: str | None = None


def api_of(request: Request) -> Api:
    """The parts of the process that handles a request."""
    return request.app.state.api


def dialect_of(request: Request) -> Dialect:
    """The dialect of the answer: only the tinker client sends a header with its version."""
    return "tinker" if "x-sdk-version" in request.headers else "xorl"


async def submit_operation(
    request: Request, read: Callable[[bytes, ServiceInfo], OrderedOperation]
) -> tuple[str, OrderedOperation]:
    """Read the body and submit its operation; returns the id to poll and the operation.

    If the request is refused for good, its seq_id is marked as skipped, so that later calls do not wait for it.

    read: converts the body to an operation; raises ValueError or Refusal if it is invalid.
    """
    api = api_of(request)
    try:
        body = await api.bodies.read(request)
        info = await api.orchestrator.info()
        if len(body) > _THREAD_BYTES:
            async with api.reading:
                ordered = await asyncio.to_thread(read, body, info)
        else:
            ordered = read(body, info)
    except (ValueError, Refusal) as problem:
        refusal = problem if isinstance(problem, Refusal) else Refusal(400, str(problem))
        sequence = sequence_of(request) if refusal.is_final else None
        if sequence is not None:
            await api.orchestrator.skip_seq_id(*sequence)
        raise refusal from None
    request_id = await api.orchestrator.submit(
        ordered.operation,
        dialect_of(request),
        key=ordered.key,
        seq_id=ordered.seq_id,
        session_id=ordered.session_id,
    )
    return request_id, ordered


async def future_response(request: Request, read: Callable[[bytes, ServiceInfo], OrderedOperation]) -> Response:
    """Submit the request's operation and answer with the id that the client polls."""
    request_id, ordered = await submit_operation(request, read)
    answer: dict[str, str | list[str]] = {"request_id": request_id}
    if isinstance(ordered.operation, Sample):
        # Derived from the request's id, so that a retry gets the same ids. Scoring a prompt returns no sample.
        num_sequences = 0 if ordered.operation.max_tokens == 0 else ordered.operation.num_samples
        answer["sample_sequence_ids"] = [f"{request_id}:{index}" for index in range(num_sequences)]
    else:
        answer["model_id"] = ordered.operation.model_id
    return json_response(answer)
