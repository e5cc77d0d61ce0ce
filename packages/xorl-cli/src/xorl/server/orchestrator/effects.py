"""What the end of a request changes in the records: its model, the model's tail, checkpoints and samplers."""

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
from xorl.server.orchestrator.calls import OWN_PREFIX, RECOVERY_PREFIX, encode, kept_size, saved_as, tail_of
from xorl.server.orchestrator.inference import version_of
from xorl.server.orchestrator.journal import Outcome, Record
from xorl.server.orchestrator.lane import Ticket
from xorl.server.orchestrator.registry import CheckpointRecord, ModelRecord, SamplerRecord, checkpoint_key, stored
from xorl.server.orchestrator.state import State


class Effects:
    """Makes the outcome of a request, which the journal writes in one transaction, and updates the records for it."""

    def __init__(self, state: State) -> None:
        self._state = state

    def of(self, ticket: Ticket, operation: Operation, result: Result, workers: str | None, seconds: float) -> Outcome:
        """The outcome of a request. workers: the name of those that ran it, for so many seconds."""
        now, model = time.time(), self._state.model_of(ticket)
        if model is None:
            return Outcome(ticket.request_id, encode(result), now)
        records: list[Record] = []
        tail: Literal["changes", "settles"] | None = None
        cuts: Literal["settled", "all"] | None = None
        if isinstance(result, Failure):
            records = self._failed(model, operation, result)
        elif (changed := tail_of(operation)) is not None:
            tail = "settles" if changed[1] else "changes"
            self._stepped(model, operation, result, seconds)
            model.tail_bytes += ticket.size
        elif isinstance(result, ModelCreated):
            self._created(model, result, workers)
        elif isinstance(result, Unloaded):
            model.state, model.workers, cuts = "unloaded", None, "all"
            records = self._state.registry.drop_snapshots(model.model_id)
        elif isinstance(result, Saved):
            cuts = "settled" if isinstance(operation, SaveWeights) else None
            model.save_s = seconds if cuts else model.save_s
            records = self.saved(model, operation, result, workers, is_own=ticket.request_id.startswith(OWN_PREFIX))
        records += self._state.passed(ticket)
        return Outcome(ticket.request_id, encode(result), now, tail, cuts, model.lane, records)

    def saved(
        self, model: ModelRecord, operation: Operation, result: Saved, workers: str | None, *, is_own: bool
    ) -> list[Record]:
        """Update the model's record after a save, and return the records of what was saved."""
        if isinstance(operation, SaveWeightsForSampler) and operation.sampler_id is not None:
            return [self._snapshot(model, operation.sampler_id, workers)]
        checkpoint = saved_as(operation)
        if checkpoint is None:
            return []
        assert isinstance(operation, SaveWeights | SaveWeightsForSampler | SaveFullWeights)
        like, times = kept_size(operation, checkpoint, is_adapter=self._state.options.enable_lora)
        if like == checkpoint.kind:
            model.checkpoint_bytes[like] = result.size_bytes // times
        if isinstance(operation, SaveWeights):
            model.boundary, model.boundary_steps, model.is_overwriting = checkpoint, model.num_steps, False
            model.tail_s, model.tail_bytes, model.loads = 0.0, 0, []
        if checkpoint.name.startswith(RECOVERY_PREFIX):
            model.num_recoveries += 1
            return []
        now = time.time()
        record = CheckpointRecord(
            checkpoint,
            now,
            self._state.options.model_name,
            model.lora,
            model.num_steps,
            {} if isinstance(operation, SaveFullWeights) else operation.user_metadata,
            None if operation.ttl_s is None else now + operation.ttl_s,
            version_of(model),
            is_initial=is_own,
        )
        self._state.registry.checkpoints[record.key] = record
        return [stored(record)]

    def _snapshot(self, model: ModelRecord, sampler_id: str, workers: str | None) -> Record:
        record = SamplerRecord(
            sampler_id,
            model.session_id,
            self._state.options.model_name,
            time.time(),
            snapshot_of=model.model_id,
            workers=workers,
            version=version_of(model),
        )
        self._state.registry.samplers[sampler_id] = record
        return stored(record)

    def _created(self, model: ModelRecord, result: ModelCreated, workers: str | None) -> None:
        model.state, model.workers = "ready", workers
        model.num_steps = model.boundary_steps = result.num_steps
        model.weights_id = secrets.token_hex(4)
        model.checkpoint_bytes = dict(result.checkpoint_bytes)
        if result.lora_rank is not None:
            model.lora = replace(self._asked(model.create), rank=result.lora_rank, alpha=result.lora_alpha)

    def _asked(self, create: CreateModel) -> LoraSpec:
        """The adapter that the client asked for, or, of a model made from a checkpoint, the adapter saved in it."""
        if create.lora is None and create.checkpoint is not None:
            record = self._state.registry.checkpoints.get(checkpoint_key(create.checkpoint))
            return (None if record is None else record.lora) or LoraSpec()
        return create.lora or LoraSpec()

    def _stepped(self, model: ModelRecord, operation: Operation, result: Result, seconds: float) -> None:
        model.tail_s += seconds
        if isinstance(operation, OptimStep | LoadWeights):
            model.weights_id = secrets.token_hex(4)
        if isinstance(operation, OptimStep) and isinstance(result, OptimResult):
            model.num_steps = int(result.metrics.get("step", model.num_steps + 1))
        elif isinstance(result, Loaded):
            model.num_steps = result.num_steps

    def _failed(self, model: ModelRecord, operation: Operation, failure: Failure) -> list[Record]:
        if isinstance(operation, CreateModel):
            model.state = "failed"
        elif isinstance(operation, SaveWeights) and saved_as(operation) == model.boundary:
            model.is_overwriting = False
        if not failure.model_given_up:
            return []
        model.workers = None
        return self._state.registry.drop_snapshots(model.model_id)
