"""Routes for operations on models: create, train, save, load, unload. Most return an id to poll."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from xorl.server.api.context import OrderedOperation, api_of, future_response, is_protobuf, submit_operation
from xorl.server.api.data_bodies import ForwardBody, OptimBody, parse_protobuf
from xorl.server.api.gate import decode
from xorl.server.api.model_bodies import (
    CreateModelBody,
    LoadWeightsBody,
    ModelBody,
    SaveExternalBody,
    SaveForSamplerBody,
    SaveWeightsBody,
)
from xorl.server.api.responses import json_response, refuse_invalid
from xorl.server.api.tensors import ByteBudget
from xorl.server.identifiers import check_model_id, checkpoint_folder
from xorl.server.operations import (
    AbortGradients,
    CreateModel,
    ModelOperation,
    Saved,
    SaveFullWeights,
    SaveWeights,
    Unloaded,
    UnloadModel,
)
from xorl.server.queries import GetModel, ModelInfo, ServiceInfo

router = APIRouter(prefix="/api/v1")


class KillBody(msgspec.Struct, frozen=True):
    """The body of /kill_session."""

    model_id: str = "default"
    save_checkpoint: bool = True


@router.post("/create_model")
async def create_model(request: Request) -> Response:
    """Create a model from the base."""

    def read(body: bytes, info: ServiceInfo) -> OrderedOperation:
        given = decode(body, CreateModelBody)
        operation = given.operation()
        if info.enable_lora and operation.lora is not None and operation.lora.rank == 0:
            raise ValueError(
                "lora_config.rank is 0, for full weights, but this service trains adapters: send a rank of 1 or more, "
                "or start a service with enable_lora: false"
            )
        return _model_creation(operation, given.session_id, given.model_seq_id)

    return await future_response(request, read)


@router.post("/load_weights")
async def load_weights(request: Request) -> Response:
    """Load a checkpoint into a model, or create a model from it."""

    def read(body: bytes, info: ServiceInfo) -> OrderedOperation:
        given = decode(body, LoadWeightsBody)
        operation = given.operation()
        if isinstance(operation, CreateModel):
            return _model_creation(operation, given.session_id, given.model_seq_id)
        return _ordered(operation, given.seq_id)

    return await future_response(request, read)


@router.post("/forward_backward")
async def forward_backward(request: Request) -> Response:
    """Compute a loss and accumulate its gradient; a protobuf body can also request the loss alone."""
    return await _forward(request, forward_only=False)


@router.post("/forward")
async def forward(request: Request) -> Response:
    """Compute a loss without a gradient."""
    return await _forward(request, forward_only=True)


@router.post("/optim_step")
async def optim_step(request: Request) -> Response:
    """Take an optimizer step."""
    return await future_response(request, _reader_of(OptimBody))


@router.post("/abort_gradient_epoch")
async def abort_gradients(request: Request) -> Response:
    """Drop the accumulated gradient."""

    def read(body: bytes, info: ServiceInfo) -> OrderedOperation:
        given = decode(body, ModelBody)
        return _ordered(AbortGradients(check_model_id(given.model_id)), given.seq_id)

    return await future_response(request, read)


@router.post("/save_weights")
async def save_weights(request: Request) -> Response:
    """Save a checkpoint from which training can continue."""
    return await future_response(request, _reader_of(SaveWeightsBody))


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request) -> Response:
    """Save weights to sample from, in a named checkpoint or in memory."""
    return await future_response(request, _reader_of(SaveForSamplerBody))


@router.post("/save_weights_external")
async def save_weights_external(request: Request) -> Response:
    """Export an adapter, or full weights, for other tools."""
    return await future_response(request, _reader_of(SaveExternalBody))


@router.post("/save_full_weights_safetensors")
async def save_full_weights(request: Request) -> Response:
    """Export a whole model in Hugging Face's layout, with an adapter merged into it; answered when it is done."""

    def read(body: bytes, info: ServiceInfo) -> OrderedOperation:
        return _ordered(decode(body, SaveExternalBody).operation(is_merged=True), None)

    api = api_of(request)
    request_id, ordered = await submit_operation(request, read)
    saved = await api.orchestrator.result(request_id, Saved)
    assert isinstance(ordered.operation, SaveFullWeights)
    folder = checkpoint_folder(Path((await api.orchestrator.info()).output_dir), saved.checkpoint)
    num_shards = len(list(folder.glob("*.safetensors")))
    path = saved.checkpoint.uri("xorl")
    return json_response({"path": path, "dtype": ordered.operation.dtype, "num_shards": num_shards})


@router.post("/unload_model")
async def unload_model(request: Request) -> Response:
    """Unload a model."""

    def read(body: bytes, info: ServiceInfo) -> OrderedOperation:
        return _ordered(UnloadModel(check_model_id(decode(body, ModelBody).model_id)), None)

    return await future_response(request, read)


@router.post("/kill_session")
async def kill_session(request: Request) -> Response:
    """Save a model if `save_checkpoint`, and unload it; answered when it is done."""
    api = api_of(request)
    given = await api.bodies.parse(request, KillBody)
    with refuse_invalid():
        model_id = check_model_id(given.model_id)
    path = None
    if given.save_checkpoint:
        save = SaveWeights(model_id, f"killed-{secrets.token_hex(4)}")
        saved = await api.orchestrator.run(save, Saved)
        path = saved.checkpoint.uri("xorl")
    await api.orchestrator.run(UnloadModel(model_id), Unloaded)
    message = f"model {model_id} was unloaded"
    return json_response({"success": True, "message": message, "checkpoint_path": path})


@router.post("/get_info")
async def get_info(request: Request) -> Response:
    """Describe a model."""
    api = api_of(request)
    given = await api.bodies.parse(request, ModelBody)
    info = await api.orchestrator.ask(GetModel(given.model_id), ModelInfo)
    return json_response(
        {
            "type": "get_info",
            "model_id": info.model_id,
            "model_name": info.base_model,
            "is_lora": info.lora is not None,
            "lora_rank": None if info.lora is None else info.lora.rank,
            "model_data": {"arch": info.arch, "model_name": info.tokenizer_name, "tokenizer_id": info.tokenizer},
            "optimizer_config": {"type": "adamw"},
            "step": info.step,
        }
    )


async def _forward(request: Request, *, forward_only: bool) -> Response:
    budget = ByteBudget(api_of(request).settings.body_bytes)

    def read(body: bytes, info: ServiceInfo) -> OrderedOperation:
        if is_protobuf(request):
            operation, seq_id = parse_protobuf(body, info.vocab_size, budget)
            if seq_id < 1:
                raise ValueError(f"seq_id must be 1 or more, got {seq_id}")
            return _ordered(operation, seq_id)
        given = decode(body, ForwardBody)
        operation = given.operation(forward_only=forward_only, vocab_size=info.vocab_size, budget=budget)
        return _ordered(operation, given.seq_id)

    return await future_response(request, read)


class _OperationBody(Protocol):
    """A body that contains everything that its operation needs."""

    @property
    def seq_id(self) -> int | None: ...

    def operation(self) -> ModelOperation: ...


def _reader_of(kind: type[_OperationBody]) -> Callable[[bytes, ServiceInfo], OrderedOperation]:
    """The `read` function of `submit_operation` for this kind of body."""

    def read(body: bytes, info: ServiceInfo) -> OrderedOperation:
        given = decode(body, kind)
        return _ordered(given.operation(), given.seq_id)

    return read


def _model_creation(operation: CreateModel, session_id: str | None, model_seq_id: int | None) -> OrderedOperation:
    if session_id is None:
        # The key is the model's id. Once the model has been used, the same key is no longer a retry (see Admission).
        key = f"create/{operation.model_id}"
    else:
        key = None if model_seq_id is None else f"create/{session_id}/{model_seq_id}"
    return OrderedOperation(operation, key=key, session_id=session_id)


def _ordered(operation: ModelOperation, seq_id: int | None) -> OrderedOperation:
    if seq_id is not None and seq_id < 0:
        raise ValueError(f"seq_id must be 0 or more, got {seq_id}")
    return OrderedOperation(operation, None if seq_id is None else f"call/{operation.model_id}/{seq_id}", seq_id)
