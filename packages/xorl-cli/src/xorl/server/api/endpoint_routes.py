"""Routes for inference endpoints: register, list, remove, and send weights."""

from __future__ import annotations

import json
from ipaddress import ip_address
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from xorl.config.server import HOST_NAME
from xorl.server.api.context import Api, api_of
from xorl.server.api.responses import JSON, Refusal, json_response, refuse_invalid
from xorl.server.api.results import sync_json
from xorl.server.endpoint_queries import (
    AddEndpoint,
    ConnectEndpoints,
    DisconnectEndpoints,
    Endpoints,
    EndpointState,
    ListEndpoints,
    RemoveEndpoint,
    SetSyncQuantization,
)
from xorl.server.identifiers import check_model_id
from xorl.server.messages import Ok
from xorl.server.operations import BlockFp8, Endpoint, SyncResult, SyncWeights
from xorl.server.status_queries import GetStatus, Status

router = APIRouter()

# The model id that xorl-client uses by default.
_DEFAULT = "default"

# The only quantized format that SGLang accepts from a trainer; keys and values as in Hugging Face's configuration.
_BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# xorl-client's names for transfer methods; here they all mean a broadcast to a group.
_METHODS = ("nccl_broadcast", "nccl", "nccl_ep_scatter")


class EndpointBody(msgspec.Struct, frozen=True):
    """The body of /add_inference_endpoint and /remove_inference_endpoint."""

    host: str
    port: int
    worker_port: int | None = None
    world_size: int = 1
    pool: str = "default"
    receiver_kv_cache_dtype: str | None = None
    model_id: str | None = None
    sync_weights: bool = False
    master_address: str | None = None
    master_port: int = 0
    group_name: str = "weight_sync_group"
    buffer_size_mb: int = 1024


class ConnectBody(msgspec.Struct, frozen=True):
    """The body of /connect_inference_endpoint."""

    master_address: str | None = None
    master_port: int = 0
    group_name: str = "weight_sync_group"


class SyncBody(msgspec.Struct, frozen=True):
    """The body of /sync_inference_weights. xorl-client does not send a model_id."""

    model_id: str | None = None
    sync_method: str | None = None
    master_address: str | None = None
    master_port: int = 0
    group_name: str = "weight_sync_group"
    buffer_size_mb: int = 1024
    flush_cache: bool | None = None
    cache_invalidation_mode: Literal["auto", "flush", "none"] = "auto"
    pause_mode: Literal["retract", "abort", "in_place"] = "retract"
    weight_version: str | None = None
    quantization: dict[str, Any] | None = None
    pools: list[str] | None = None


class QuantizationBody(msgspec.Struct, frozen=True):
    """The body of /set_sync_quantization: a `quantization_config` as in Hugging Face's files, or null."""

    quantization: dict[str, Any] | None


@router.post("/add_inference_endpoint")
async def add_endpoint(request: Request) -> Response:
    """Register an endpoint and, if `sync_weights`, send it the model's weights."""
    api = api_of(request)
    given = await api.bodies.parse(request, EndpointBody)
    _check(given)
    query = AddEndpoint(
        Endpoint(given.host, given.port, given.world_size, given.sync_weights),
        group_name=given.group_name,
        master_address=given.master_address or "",
        master_port=given.master_port,
        buffer_size_mb=given.buffer_size_mb,
    )
    added = await api.orchestrator.ask(query, EndpointState)
    is_healthy = added.state == "healthy"
    synced, sync_message = False, "call sync_inference_weights to send weights"
    if given.sync_weights and is_healthy:
        synced, sync_message = await _send_to(api, added.endpoint, given)
    return json_response(
        {
            "success": is_healthy,
            "message": added.message or f"{given.host}:{given.port} was added",
            "endpoint": endpoint_json(added),
            "weights_synced": synced,
            "sync_message": sync_message,
        }
    )


@router.get("/list_inference_endpoints")
async def list_endpoints(request: Request) -> Response:
    """List the registered endpoints."""
    listed = await api_of(request).orchestrator.ask(ListEndpoints(), Endpoints)
    states: list[JSON] = [endpoint_json(state) for state in listed.endpoints]
    return json_response({"endpoints": states, "count": len(states)})


@router.post("/remove_inference_endpoint")
async def remove_endpoint(request: Request) -> Response:
    """Remove an endpoint."""
    api = api_of(request)
    given = await api.bodies.parse(request, EndpointBody)
    await api.orchestrator.ask(RemoveEndpoint(given.host, given.port), Ok)
    return json_response({"success": True, "message": f"{given.host}:{given.port} was removed"})


@router.post("/connect_inference_endpoint")
async def connect_endpoints(request: Request) -> Response:
    """Probe all endpoints and use those that answer."""
    api = api_of(request)
    given = await api.bodies.parse(request, ConnectBody)
    query = ConnectEndpoints(given.master_address or "", given.master_port, given.group_name)
    listed = await api.orchestrator.ask(query, Endpoints)
    healthy: list[JSON] = [endpoint_json(state) for state in listed.endpoints if state.state == "healthy"]
    message = f"{len(healthy)} of {len(listed.endpoints)} endpoints answer"
    return json_response({"success": bool(healthy), "message": message, "connected_endpoints": healthy})


@router.post("/disconnect_inference_endpoint")
async def disconnect_endpoints(request: Request) -> Response:
    """Stop using all endpoints until they are connected again."""
    api = api_of(request)
    await api.bodies.read(request)
    listed = await api.orchestrator.ask(DisconnectEndpoints(), Endpoints)
    return json_response({"success": True, "message": f"{len(listed.endpoints)} endpoints are disconnected"})


@router.post("/sync_inference_weights")
@router.post("/api/v1/sync_inference_weights")
async def sync_weights(request: Request) -> Response:
    """Send weights to the endpoints; answered when the transfer has succeeded or failed."""
    api = api_of(request)
    given = await api.bodies.parse(request, SyncBody)
    if given.sync_method is not None and given.sync_method not in _METHODS:
        raise Refusal(400, f"sync_method must be one of {', '.join(_METHODS)}, got {given.sync_method[:40]!r}")
    if given.pools is not None:
        raise Refusal(400, "pools are not supported, weights are sent to all endpoints that accept them: leave it out")
    _check_transfer(given)
    quantization = _quantization(given.quantization)
    flush = given.flush_cache
    if flush is None:
        # in_place continues running requests, which need the cached keys and values that a flush would drop.
        flush = {"auto": given.pause_mode != "in_place", "flush": True, "none": False}[given.cache_invalidation_mode]
    with refuse_invalid():
        operation = SyncWeights(
            await _model_id(api, given.model_id),
            master_address=given.master_address or "",
            master_port=given.master_port,
            group_name=given.group_name,
            buffer_size_mb=given.buffer_size_mb,
            pause_mode=given.pause_mode,
            flush_cache=flush,
            weight_version=given.weight_version,
            quantization=quantization,
        )
    return json_response(sync_json(await api.orchestrator.run(operation, SyncResult)))


@router.post("/api/v1/set_sync_quantization")
async def set_sync_quantization(request: Request) -> Response:
    """Set the quantization of later weight syncs."""
    api = api_of(request)
    given = await api.bodies.parse(request, QuantizationBody)
    chosen = _quantization(given.quantization)
    await api.orchestrator.ask(SetSyncQuantization(chosen), Ok)
    message = "weights are sent in the model's dtype" if chosen is None else "weights are sent in block fp8"
    return json_response({"quantization": given.quantization, "message": message})


async def _send_to(api: Api, endpoint: Endpoint, given: EndpointBody) -> tuple[bool, str]:
    """Send the model's weights to an endpoint that was just added; returns whether it worked, and a message."""
    try:
        operation = SyncWeights(
            await _model_id(api, given.model_id),
            endpoints=(endpoint,),
            master_address=given.master_address or "",
            master_port=given.master_port,
            group_name=given.group_name,
            buffer_size_mb=given.buffer_size_mb,
        )
        result = await api.orchestrator.run(operation, SyncResult)
    except (Refusal, ValueError) as problem:
        return False, f"the endpoint was added, but the model's weights could not be sent: {problem}"
    return result.success, result.message


async def _model_id(api: Api, given: str | None) -> str:
    """The model whose weights to send: the given one, or the model named default, or the only one."""
    if given is not None:
        return check_model_id(given)
    status = await api.orchestrator.ask(GetStatus(), Status)
    model_ids = sorted({model_id for session in status.sessions for model_id in session.models})
    if _DEFAULT in model_ids:
        return _DEFAULT
    if not model_ids:
        raise Refusal(404, "there is no model to send; create one first")
    if len(model_ids) > 1:
        raise Refusal(400, f"there are several models: set model_id to one of {', '.join(model_ids[:8])}")
    return model_ids[0]


def _quantization(config: dict[str, Any] | None) -> BlockFp8 | None:
    """The quantization that a `quantization_config` describes; refused unless it is block fp8."""
    if config is None:
        return None
    remaining = {key: value for key, value in config.items() if value is not None}
    for key, supported in _BLOCK_FP8.items():
        if remaining.pop(key, supported) != supported:
            raise Refusal(400, f"quantization: {key} must be {json.dumps(supported)}, got {json.dumps(config[key])}")
    exclude: list[str] = []
    for key in ("modules_to_not_convert", "ignored_layers"):  # synonyms
        names = remaining.pop(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise Refusal(400, f"quantization: {key} must be a list of names, got {json.dumps(names)}")
        exclude += names
    if remaining:
        raise Refusal(400, f"quantization: unknown {', '.join(sorted(remaining))}: leave it out")
    return BlockFp8(tuple(exclude))


def _check(given: EndpointBody) -> None:
    if not 1 <= given.port <= 65535 or not _is_host(given.host):
        reason = "an endpoint needs a host name or address, and a port of 1 to 65535"
        raise Refusal(400, f"{reason}, got {given.host[:100]!r}:{given.port}")
    if given.world_size < 1:
        raise Refusal(400, f"world_size must be 1 or more, got {given.world_size}")
    if given.pool != "default" or given.receiver_kv_cache_dtype is not None:
        raise Refusal(400, "pool and receiver_kv_cache_dtype are not supported, leave them out")
    _check_transfer(given)


def _is_host(host: str) -> bool:
    """Whether this is only a host name or an address, without a path or other parts of a URL."""
    try:
        return HOST_NAME.fullmatch(host) is not None or bool(ip_address(host))
    except ValueError:
        return False


def _check_transfer(given: EndpointBody | SyncBody) -> None:
    """Validate the options of a transfer now; otherwise a sync after a step would fail long after this call."""
    if given.buffer_size_mb < 1:
        raise Refusal(400, f"buffer_size_mb must be 1 or more, got {given.buffer_size_mb}")
    if not 0 <= given.master_port <= 65535:
        raise Refusal(400, f"master_port must be 1 to 65535, or 0 for a free one, got {given.master_port}")


def endpoint_json(state: EndpointState) -> dict[str, JSON]:
    """An endpoint as clients see it."""
    endpoint = state.endpoint
    info: dict[str, Any] = dict(state.server_info)
    return {
        "host": endpoint.host,
        "port": endpoint.port,
        "worker_port": endpoint.port,
        "world_size": endpoint.world_size,
        "sync_weights": endpoint.sync_weights,
        "healthy": state.state == "healthy",
        "state": state.state,
        "message": state.message,
        "weight_version": state.weight_version,
        "server_info": info,
    }
