"""Samples within one HTTP call: at once, or in parts for a stream. A client that disconnects ends its samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import TypeVar

import numpy as np
from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from xorl.server.api.context import Api
from xorl.server.datum import Array
from xorl.server.operations import Sample, SampledSequence, SampleResult

AnswerT = TypeVar("AnswerT")

# A part of a stream has at first this many tokens, so that it begins soon, and at last that many, so that its parts
# cost little more than one request.
FIRST_PART, LARGEST_PART = 8, 64


async def sample(api: Api, operation: Sample) -> tuple[str, SampleResult]:
    """The id of a request and its result. Cancels the request if this call is cancelled, since no one knows the id."""
    request_id = await api.orchestrator.submit(operation, "xorl")
    try:
        return request_id, await api.orchestrator.result(request_id, SampleResult)
    except asyncio.CancelledError:
        await asyncio.shield(api.orchestrator.cancel(request_id))
        raise


async def sample_in_parts(api: Api, operation: Sample) -> AsyncIterator[SampledSequence]:
    """The parts of one sample, each as soon as it is sampled. Together they are the sample of `operation`.

    operation: of one sample, with a seed and max_tokens.
    """
    assert operation.seed is not None, "every part draws from the same random numbers"
    assert operation.max_tokens is not None, "the caller knows the context"
    prompt, sampled = operation.prompt.numpy(), np.zeros(0, np.int32)
    size = FIRST_PART
    while len(sampled) < operation.max_tokens:
        part = replace(
            operation,
            prompt=Array.of(np.concatenate([prompt, sampled]).astype(np.int32)),
            num_continued=len(sampled),
            max_tokens=min(size, operation.max_tokens - len(sampled)),
        )
        (sequence,) = (await sample(api, part))[1].sequences
        yield sequence
        if sequence.stop_reason == "stop":
            return
        sampled = np.concatenate([sampled, sequence.tokens.numpy()])
        size = min(2 * size, LARGEST_PART)


async def event_stream(request: Request, events: AsyncGenerator[bytes]) -> Response:
    """An answer as server-sent events. A request that fails at once is refused with a status, as without a stream."""
    try:
        first = await while_connected(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return StreamingResponse(_joined(first, events), media_type="text/event-stream")


async def _joined(first: bytes, events: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for event in events:
            yield event
    finally:
        await events.aclose()


async def while_connected(request: Request, answer: Coroutine[None, None, AnswerT]) -> AnswerT:
    """Wait for the answer; cancel it and raise ClientDisconnect if the client closes its connection first."""
    answering, disconnecting = asyncio.ensure_future(answer), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait([answering, disconnecting], return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        answering.cancel()
        disconnecting.cancel()
        await asyncio.wait([answering])


async def _disconnect(request: Request) -> None:
    """Wait until the client closes its connection. The request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
