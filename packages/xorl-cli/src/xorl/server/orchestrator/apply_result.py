"""Applies the result of a request to the records: its model, the model's tail, checkpoints and samplers.

`apply_result` updates the records in memory and returns the outcome, which the journal writes in one transaction.
"""

from __future__ import annotations

import secrets
import time
from typing import Literal

from msgspec.structs import replace

from xorl.server.messages import Operation, Result
from xorl.server.operations import (
    CreateModel,
    Failure,
    Loaded,
    LoadWeights,
    LoraSpec,
    ModelCreated,
    OptimResult,
    OptimStep,
    Saved,
    SaveFullWeights,
    SaveWeights,
    SaveWeightsForSampler,
    Unloaded,
)
from xorl.server.orchestrator.inference import weights_version
from xorl.server.orchestrator.journal import Outcome, Record
from xorl.server.orchestrator.lane import Ticket
from xorl.server.orchestrator.operation_properties import (
    INITIAL_NAME,
    INTERNAL_PREFIX,
    RECOVERY_PREFIX,
    encode,
    estimated_size,
    saved_as,
    tail_of,
)
from xorl.server.orchestrator.registry import CheckpointRecord, ModelRecord, SamplerRecord, checkpoint_key, stored
from xorl.server.orchestrator.state import State
from xorl.server.orchestrator.unnamed import (
    KEPT_S,
    NUM_ADAPTERS,
    NUM_WHOLE_MODELS,
    expire_excess,
    expire_with_model,
    is_unnamed,
)


def apply_result(
    state: State, ticket: Ticket, operation: Operation, result: Result, workers: str | None, seconds: float
) -> Outcome:
    """Update the records for the result of a request. workers: the incarnation that ran it, for `seconds`."""
    now, model = time.time(), state.model_of(ticket)
    if isinstance(result, Saved) and isinstance(operation, SaveWeightsForSampler):
        result = replace(result, sampler_id=operation.sampler_id)
    if model is None:
        return Outcome(ticket.request_id, encode(result), now)
    records: list[Record] = []
    tail = None if isinstance(result, Failure) else tail_of(operation)
    cuts: Literal["settled", "all"] | None = None
    if isinstance(result, Failure):
        _apply_failure(model, operation, result, ticket.arrival)
    elif tail is not None:
        _apply_training(model, operation, result, seconds)
        model.tail_bytes += ticket.size
    elif isinstance(result, ModelCreated):
        _apply_creation(state, model, result, workers)
    elif isinstance(result, Unloaded):
        model.state, model.workers, cuts = "unloaded", None, "all"
        is_finished = state.registry.is_finished(model)
        initial_at = now if is_finished else now + state.options.finished_session_retention_s
        records = expire_with_model(state.registry, model.model_id, now, initial_at)
    elif isinstance(result, Saved):
        cuts = "settled" if isinstance(operation, SaveWeights) else None
        model.save_s = seconds if cuts else model.save_s
        is_internal = ticket.request_id.startswith(INTERNAL_PREFIX)
        records = apply_save(state, model, operation, result, is_internal=is_internal)
    records += state.leave_order(ticket)
    return Outcome(ticket.request_id, encode(result), now, tail, cuts, model.lane, records)


def apply_save(
    state: State, model: ModelRecord, operation: Operation, result: Saved, *, is_internal: bool
) -> list[Record]:
    """Update the model's record after a save; returns the records of the checkpoint and its sampling session."""
    checkpoint = saved_as(operation)
    if checkpoint is None:
        return []
    assert isinstance(operation, SaveWeights | SaveWeightsForSampler | SaveFullWeights)
    like, factor = estimated_size(operation, checkpoint, is_adapter=state.options.enable_lora)
    if like == checkpoint.kind:
        model.checkpoint_bytes[like] = result.size_bytes // factor
    if isinstance(operation, SaveWeights):
        model.boundary, model.boundary_steps, model.is_overwriting = checkpoint, model.num_steps, False
        model.tail_s, model.tail_bytes, model.loads = 0.0, 0, {}
    if checkpoint.name.startswith(RECOVERY_PREFIX):
        model.num_recoveries += 1
        return []
    now, ttl_s = time.time(), operation.ttl_s
    if is_unnamed(checkpoint) and ttl_s is None:
        ttl_s = KEPT_S
    record = CheckpointRecord(
        checkpoint,
        now,
        state.options.model_name,
        model.lora,
        model.num_steps,
        {} if isinstance(operation, SaveFullWeights) else operation.user_metadata,
        None if ttl_s is None else now + ttl_s,
        weights_version(model),
        is_initial=is_internal and checkpoint.name == INITIAL_NAME,
    )
    state.registry.checkpoints[record.key] = record
    records = [stored(record)]
    if isinstance(operation, SaveWeightsForSampler) and operation.sampler_id is not None:
        sampler = SamplerRecord(operation.sampler_id, model.session_id, state.options.model_name, now, checkpoint)
        state.registry.samplers[sampler.sampling_session_id] = sampler
        records.append(stored(sampler))
    if is_unnamed(checkpoint):
        num_kept = NUM_ADAPTERS if state.options.enable_lora else NUM_WHOLE_MODELS
        records += expire_excess(state.registry, model.model_id, now, num_kept=num_kept)
    return records


def _apply_creation(state: State, model: ModelRecord, result: ModelCreated, workers: str | None) -> None:
    model.state, model.workers = "ready", workers
    model.num_steps = model.boundary_steps = result.num_steps
    model.weights_id = secrets.token_hex(4)
    model.checkpoint_bytes = dict(result.checkpoint_bytes)
    if result.lora_rank is not None:
        lora = model.create.lora
        if lora is None and model.create.checkpoint is not None:
            # The adapter that is saved in the checkpoint.
            record = state.registry.checkpoints.get(checkpoint_key(model.create.checkpoint))
            lora = None if record is None else record.lora
        model.lora = replace(lora or LoraSpec(), rank=result.lora_rank, alpha=result.lora_alpha)


def _apply_training(model: ModelRecord, operation: Operation, result: Result, seconds: float) -> None:
    model.tail_s += seconds
    if isinstance(operation, OptimStep | LoadWeights):
        model.weights_id = secrets.token_hex(4)
    if isinstance(operation, OptimStep) and isinstance(result, OptimResult):
        model.num_steps = int(result.metrics.get("step", model.num_steps + 1))
    elif isinstance(result, Loaded):
        model.num_steps = result.num_steps


def _apply_failure(model: ModelRecord, operation: Operation, failure: Failure, number: int) -> None:
    if isinstance(operation, CreateModel):
        model.state = "failed"
    elif isinstance(operation, SaveWeights) and saved_as(operation) == model.boundary:
        model.is_overwriting = False
    elif isinstance(operation, LoadWeights):
        # It is not in the tail.
        model.loads.pop(number, None)
    if failure.model_given_up:
        model.workers = None
