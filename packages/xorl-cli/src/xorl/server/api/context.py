"""What routes share: the process's parts, the dialect of a request, and how an operation is handed on in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from xorl.server.api.gate import Bodies, Measures
from xorl.server.api.orchestrator_client import OrchestratorClient
from xorl.server.api.place import place_of
from xorl.server.api.refusal import Refusal
from xorl.server.api.reply import json_response
from xorl.server.api.settings import ApiSettings
from xorl.server.api.tensors import Room
from xorl.server.api.text import TextCoder
from xorl.server.identifiers import Dialect
from xorl.server.operations import ModelOperation, Sample
from xorl.server.queries import ServiceInfo

# Shorter bodies are read faster than a thread takes them.
_THREAD_BYTES = 2**18


@dataclass(frozen=True)
class Api:
    """The parts of the process. reading: how many long bodies are read at once, for the memory that they take."""

    settings: ApiSettings
    orchestrator: OrchestratorClient
    bodies: Bodies
    measures: Measures
    text: TextCoder
    reading: asyncio.Semaphore

    def room(self) -> Room:
        """For the tensors of one request."""
        return Room(self.settings.body_bytes)


@dataclass(frozen=True)
class Ordered:
    """An operation, and what Submit says of it."""

    operation: ModelOperation | Sample
    key: str | None = None
    seq_id: int | None = None
    session_id: str | None = None


def api_of(request: Request) -> Api:
    """The process's parts."""
    return request.app.state.api


def dialect_of(request: Request) -> Dialect:
    """Whose form an answer takes; one client says its version in a header."""
    return "tinker" if "x-sdk-version" in request.headers else "xorl"


async def submitted(request: Request, read: Callable[[bytes, ServiceInfo], Ordered]) -> tuple[str, Ordered]:
    """Read the body and hand it on; returns the id to poll. What is refused here leaves no gap in its model's order.

    read: the body to an operation; raises ValueError, or Refusal, for what is wrong with it.
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
        place = place_of(request) if refusal.is_final else None
        if place is not None:
            await api.orchestrator.refuse_place(*place)
        raise refusal from None
    request_id = await api.orchestrator.submit(
        ordered.operation,
        dialect_of(request),
        key=ordered.key,
        seq_id=ordered.seq_id,
        session_id=ordered.session_id,
    )
    return request_id, ordered


async def future(request: Request, read: Callable[[bytes, ServiceInfo], Ordered]) -> Response:
    """`submitted`, answered by what a client polls with."""
    request_id, ordered = await submitted(request, read)
    answer: dict[str, str | list[str]] = {"request_id": request_id}
    if isinstance(ordered.operation, Sample):
        # A retry gets the first one's id, and so the same names. Who asks about the prompt alone gets no sample.
        num_sequences = 0 if ordered.operation.max_tokens == 0 else ordered.operation.num_samples
        answer["sample_sequence_ids"] = [f"{request_id}:{index}" for index in range(num_sequences)]
    else:
        answer["model_id"] = ordered.operation.model_id
    return json_response(answer)
