"""The models that can be sampled from by name: the base, clients' models with their newest weights, checkpoints."""

from __future__ import annotations

import time

from xorl.server.identifiers import parse_uri
from xorl.server.messages import Rejected
from xorl.server.operations import BaseSampler, CheckpointSampler
from xorl.server.orchestrator.operation_properties import RESERVED_PREFIXES
from xorl.server.orchestrator.registry import CheckpointRecord, checkpoint_key
from xorl.server.orchestrator.state import State
from xorl.server.queries import FindServedModel, ListServedModels, ServedModel, ServedModels


async def list_served_models(state: State, query: ListServedModels) -> ServedModels:
    """The base, then models and named sampler checkpoints, newest first."""
    checkpoints = [record for record in _usable(state) if record.checkpoint.kind == "sampler_weights"]
    named = [record for record in checkpoints if not record.checkpoint.name.startswith(RESERVED_PREFIXES)]
    owners = {record.checkpoint.model_id for record in _usable(state)}
    models = [
        ServedModel(model.model_id, newest.created, CheckpointSampler(newest.checkpoint))
        for model in state.registry.models.values()
        if model.exists and model.model_id in owners and (newest := _newest(state, model.model_id)) is not None
    ]
    models += [
        ServedModel(record.checkpoint.uri("xorl"), record.created, CheckpointSampler(record.checkpoint))
        for record in named
    ]
    return ServedModels([_base(state), *sorted(models, key=lambda model: model.created, reverse=True)])


async def find_served_model(state: State, query: FindServedModel) -> ServedModel | Rejected:
    """The model of a name: the base's, a checkpoint's URI, a model's id, or the name of a sampler checkpoint."""
    name, options = query.name, state.options
    if name in options.base_names:
        return _base(state)
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
