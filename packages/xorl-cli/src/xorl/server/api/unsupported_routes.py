"""Routes that refuse unsupported calls. Some have a seq_id in the order of a model's calls, which is then skipped."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from xorl.server.api.context import OrderedOperation, future_response
from xorl.server.api.refusal import Refusal
from xorl.server.queries import ServiceInfo

router = APIRouter(prefix="/api/v1")

_NO_HOSTING = (
    "{path}: this service does not host models elsewhere; sample from the service itself, or from your own inference "
    "server with add_inference_endpoint and sync_inference_weights"
)


@router.post("/update_dedicated_endpoint")
@router.post("/update_serverless_weights")
async def update_hosted_weights(request: Request) -> Response:
    """Refuse to update a vendor's inference servers."""
    path = request.url.path.rpartition("/")[2]
    return await _refused(request, Refusal(400, _NO_HOSTING.format(path=path)))


@router.post("/{path:path}")
async def unknown(request: Request) -> Response:
    """Refuse every POST that no other route matches."""
    return await _refused(request, Refusal(404, f"this service has no POST {request.url.path[:200]}"))


async def _refused(request: Request, refusal: Refusal) -> Response:
    def read(body: bytes, info: ServiceInfo) -> OrderedOperation:
        raise refusal

    return await future_response(request, read)
