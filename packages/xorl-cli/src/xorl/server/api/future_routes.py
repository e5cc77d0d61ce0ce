"""Routes for polling results. A poll waits for up to `ApiSettings.poll_s` and reports the position in the queue."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from xorl.server.api.context import api_of, dialect_of
from xorl.server.api.responses import JSON, Refusal, json_response, no_request
from xorl.server.api.results import result_json, result_protobuf
from xorl.server.messages import Finished, Pending, Unknown
from xorl.server.operations import LossResult, SampleResult

router = APIRouter(prefix="/api/v1")

# Results with more datums are encoded in a thread, so that they do not block other requests.
_THREAD_DATUMS = 64


class FutureBody(msgspec.Struct, frozen=True):
    """The body of /retrieve_future and /cancel_future."""

    request_id: str
    allow_metadata_only: bool = False


@router.post("/retrieve_future")
async def retrieve_future(request: Request) -> Response:
    """Return a result in the client's format, or ask the client to poll again."""
    api = api_of(request)
    given = await api.bodies.parse(request, FutureBody)
    answer = await api.orchestrator.poll(given.request_id, api.settings.poll_s)
    if isinstance(answer, Finished):
        if (
            isinstance(answer.result, LossResult)
            and len(next(iter(answer.result.fields.values()), [])) > _THREAD_DATUMS
        ):
            return await asyncio.to_thread(_finished, request, answer)
        return _finished(request, answer)
    if isinstance(answer, Unknown):
        if answer.was_known:
            raise Refusal(410, f"the result of {given.request_id[:100]} has expired: send the request again")
        raise no_request(given.request_id)
    # tinker polls again after 408; xorl-client would log that as an error, so it gets 200.
    return json_response(_try_again(answer), 408 if dialect_of(request) == "tinker" else 200)


@router.post("/cancel_future")
async def cancel_future(request: Request) -> Response:
    """Cancel a request that has not begun, a sample or a pass; the answer has the request's status."""
    api = api_of(request)
    given = await api.bodies.parse(request, FutureBody)
    outcome = await api.orchestrator.cancel(given.request_id)
    return json_response({"request_id": outcome.request_id, "status": outcome.status})


def _finished(request: Request, answer: Finished) -> Response:
    takes_protobuf, result = "application/x-protobuf" in request.headers.get("accept", ""), answer.result
    # tinker's message of samples has no field for their experts, which its clients cannot request.
    has_routes = isinstance(result, SampleResult) and result.prompt_routed_experts is not None
    if takes_protobuf and isinstance(result, LossResult | SampleResult) and not has_routes:
        return Response(result_protobuf(result), media_type="application/x-protobuf")
    return json_response(result_json(answer.result, answer.dialect))


def _try_again(pending: Pending) -> JSON:
    reason = pending.reason
    if reason is None and pending.position is not None:
        reason = f"{pending.position} requests are ahead of this one"
    return {
        "type": "try_again",
        "request_id": pending.request_id,
        "queue_state": pending.queue_state,
        "queue_state_reason": reason,
        "queue_position": pending.position,
    }
