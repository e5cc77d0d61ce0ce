"""The models that can be sampled from by name: the base, clients' models with their newest weights, checkpoints."""

from __future__ import annotations

import asyncio
import secrets
import time

from xorl.server.identifiers import parse_uri
from xorl.server.messages import Rejected
from xorl.server.operations import BaseSampler, CheckpointSampler, Failure, Saved, SaveWeightsForSampler
from xorl.server.orchestrator import waiting
from xorl.server.orchestrator.admission import Admission
from xorl.server.orchestrator.inference import weights_version
from xorl.server.orchestrator.operation_properties import (
    INTERNAL_PREFIX,
    RESERVED_PREFIXES,
    UNNAMED_PREFIX,
    decode_result,
)
from xorl.server.orchestrator.registry import CheckpointRecord, ModelRecord, checkpoint_key
from xorl.server.orchestrator.state import State
from xorl.server.queries import FindServedModel, ListServedModels, ServedModel, ServedModels


async def list_served_models(state: State, query: ListServedModels) -> ServedModels:
    """The base, then models and named sampler checkpoints, newest first."""
    checkpoints = [record for record in _usable(state) if record.checkpoint.kind == "sampler_weights"]
    named = [record for record in checkpoints if not record.checkpoint.name.startswith(RESERVED_PREFIXES)]
    models = [_saved(state, model) for model in state.registry.models.values() if _is_created(model)]
    models += [
        ServedModel(record.checkpoint.uri("xorl"), record.created, CheckpointSampler(record.checkpoint))
        for record in named
    ]
    return ServedModels([_base(state), *sorted(models, key=lambda model: model.created, reverse=True)])


async def find_served_model(state: State, admission: Admission, query: FindServedModel) -> ServedModel | Rejected:
    """Find the model for a name: the base's, a checkpoint's URI, a model's id, or the name of a sampler checkpoint.

    The id of a model stands for its current weights or, once the model has ended, for those that it saved last.
    """
    name, options = query.name, state.options
    model = state.registry.models.get(name)
    if name in options.base_names:
        return _base(state)
    if model is not None and _is_created(model):
        return await _current(state, admission, model) if query.saves else _saved(state, model)
    if "://" in name:
        try:
            checkpoint = parse_uri(name)
        except ValueError as problem:
            return Rejected(400, f"model: {problem}")
        record = state.registry.checkpoints.get(checkpoint_key(checkpoint))
        found = None if state.is_unavailable(checkpoint) or checkpoint.kind == "external_weights" else record
    else:
        found = _newest(state, name) or _newest_named(state, name)
    if found is None:
        return Rejected(
            404,
            f"model: there is no {name!r}. It may be {options.model_name}, the id of a model that has saved weights, "
            "the name or URI of weights that were saved for sampling, or the URI of a checkpoint",
        )
    return ServedModel(name, found.created, CheckpointSampler(found.checkpoint))


def _is_created(model: ModelRecord) -> bool:
    return model.exists and model.state != "creating"


def _saved(state: State, model: ModelRecord) -> ServedModel:
    """The model with the weights that it saved last, if any."""
    newest = _newest(state, model.model_id)
    if newest is None:
        return ServedModel(model.model_id, model.created, None)
    return ServedModel(model.model_id, newest.created, CheckpointSampler(newest.checkpoint))


async def _current(state: State, admission: Admission, model: ModelRecord) -> ServedModel | Rejected:
    """The model with its current weights, which are saved first unless a checkpoint holds them."""
    version, boundary = weights_version(model), model.boundary
    saved = [r for r in _usable(state) if r.checkpoint.model_id == model.model_id and r.version == version]
    if saved:
        newest = max(saved, key=lambda record: record.created)
        return ServedModel(model.model_id, newest.created, CheckpointSampler(newest.checkpoint))
    is_released = model.state == "released" and boundary is not None and not state.is_unavailable(boundary)
    if boundary is not None and is_released and not state.journal.num_settled(model.lane):
        # Saving would first restore the model and, with full weights, take the base from another model.
        return ServedModel(model.model_id, model.last_active, CheckpointSampler(boundary))
    saving = state.serving.get(model.lane)
    if saving is None:
        # Simultaneous calls share the save.
        saving = asyncio.create_task(_save(state, admission, model))
        state.serving[model.lane] = saving
        saving.add_done_callback(lambda _, lane=model.lane: state.serving.pop(lane, None))
    result = await asyncio.shield(saving)
    if isinstance(result, Saved):
        return ServedModel(model.model_id, time.time(), CheckpointSampler(result.checkpoint))
    return Rejected(
        result.status,
        f"model: {model.model_id} was trained since its weights were saved, and they cannot be saved now to sample "
        f"from: {result.message}. The URI of a checkpoint names weights that are saved",
    )


async def _save(state: State, admission: Admission, model: ModelRecord) -> Saved | Failure:
    """Save a model's weights without a name, in the order of its requests."""
    request_id = f"{INTERNAL_PREFIX}{secrets.token_hex(8)}"
    save = SaveWeightsForSampler(model.model_id, f"{UNNAMED_PREFIX}{request_id}")
    if await admission.submit_internal(save, request_id=request_id) is None:
        return Failure("user", 507, "the journal's disk is full")
    while (request := state.open.get(request_id)) is not None:
        await waiting.wait_for_end(request, waiting.MAX_WAIT_S)
    stored = state.journal.find(request_id)
    result = None if stored is None or stored.result is None else decode_result(stored.result)
    return result if isinstance(result, Saved | Failure) else Failure("server", 500, "the save has no result")


def _base(state: State) -> ServedModel:
    return ServedModel(state.options.model_name, state.started, BaseSampler())


def _usable(state: State) -> list[CheckpointRecord]:
    now = time.time()
    return [
        record
        for record in state.registry.checkpoints.values()
        if record.checkpoint.kind != "external_weights"
        and not record.has_expired(now)
        and record.checkpoint not in state.deleting
    ]


def _newest(state: State, model_id: str) -> CheckpointRecord | None:
    """The newest weights that a model saved, to sample from or to train on."""
    found = [record for record in _usable(state) if record.checkpoint.model_id == model_id]
    return max(found, key=lambda record: record.created, default=None)


def _newest_named(state: State, name: str) -> CheckpointRecord | None:
    found = [r for r in _usable(state) if r.checkpoint.kind == "sampler_weights" and r.checkpoint.name == name]
    return max(found, key=lambda record: record.created, default=None)
