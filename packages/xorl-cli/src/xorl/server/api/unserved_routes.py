"""Calls that are not served, and why. Clients count some of them among a model's calls, so they leave no gap either."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from xorl.server.api.context import Ordered, future
from xorl.server.api.refusal import Refusal
from xorl.server.queries import ServiceInfo

router = APIRouter(prefix="/api/v1")

_NO_HOSTING = (
    "{path}: this service hosts no models elsewhere; sample from the service itself, or from an inference server of "
    "your own by add_inference_endpoint and sync_inference_weights"
)


@router.post("/update_dedicated_endpoint")
@router.post("/update_serverless_weights")
async def update_hosted_weights(request: Request) -> Response:
    """Weights to a vendor's inference servers."""
    path = request.url.path.rpartition("/")[2]
    return await _refused(request, Refusal(400, _NO_HOSTING.format(path=path)))


@router.post("/{path:path}")
async def unknown(request: Request) -> Response:
    """What no route before this one has taken."""
    return await _refused(request, Refusal(404, f"this service has no POST {request.url.path[:200]}"))


async def _refused(request: Request, refusal: Refusal) -> Response:
    def read(body: bytes, info: ServiceInfo) -> Ordered:
        raise refusal

    return await future(request, read)
