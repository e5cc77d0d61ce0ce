"""Prepares a request before it is dispatched: restores its model, checks storage and checkpoints, resolves samplers."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import AsyncExitStack

from msgspec.structs import replace

from xorl.server.identifiers import CheckpointRef, checkpoint_folder
from xorl.server.messages import Operation, Work
from xorl.server.operations import (
    BaseSampler,
    CheckpointSampler,
    CreateModel,
    Failure,
    LoadWeights,
    NamedSampler,
    Sample,
    SamplerRef,
    SaveWeights,
    SessionSampler,
    SyncWeights,
    UnloadModel,
)
from xorl.server.orchestrator import catalogue
from xorl.server.orchestrator.base_use import BaseInUse, is_client_silent
from xorl.server.orchestrator.eviction import Eviction
from xorl.server.orchestrator.lane import Ticket
from xorl.server.orchestrator.operation_properties import SYNC_AFTER_STEP, estimated_size, export_refusal, saved_as
from xorl.server.orchestrator.recovery import RecoveryError, restore
from xorl.server.orchestrator.registry import ModelRecord, checkpoint_key, stored
from xorl.server.orchestrator.state import OpenRequest, State
from xorl.server.orchestrator.unnamed import KEPT_S, expire_excess, is_unnamed
from xorl.server.orchestrator.workers import Incarnation


class CannotRun(Exception):
    """The request ends without being run; `failure` is its result."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class CheckpointInUse(Exception):
    """A save would overwrite a checkpoint on which other models depend; those must be saved elsewhere first."""

    def __init__(self, model: ModelRecord, checkpoint: CheckpointRef) -> None:
        super().__init__(checkpoint.uri("xorl"))
        self.model = model
        self.checkpoint = checkpoint


class Preflight:
    """Prepares requests for dispatch, so that the workers can run them."""

    def __init__(self, state: State, eviction: Eviction) -> None:
        self._state = state
        self._eviction = eviction
        self._claim: ModelRecord | None = None  # with full weights: the model that is being put on the base

    def allow_initial_overwrite(self, operation: Operation) -> Operation:
        """The operation; a save under the name of the service's initial checkpoint is allowed to overwrite it."""
        checkpoint = saved_as(operation)
        if isinstance(operation, SaveWeights) and checkpoint is not None:
            record = self._state.registry.checkpoints.get(checkpoint_key(checkpoint))
            if record is not None and record.is_initial:
                return replace(operation, overwrite=True)
        return operation

    async def prepare(
        self, ticket: Ticket, operation: Operation, workers: Incarnation, until_settled: AsyncExitStack
    ) -> Operation:
        """Prepare an operation and return it in the form that is sent to the workers.

        until_settled: keeps the checkpoint that the operation reads in place. Raises CannotRun if it cannot run,
        CheckpointInUse if it would overwrite a checkpoint of other models, and BaseInUse if it has to wait for the
        base.
        """
        if isinstance(operation, Sample):
            return self.resolve_sampler(operation)
        model = self._state.model_of(ticket)
        if model is None or not model.exists:
            raise CannotRun(Failure("user", 410, "the model was unloaded or recreated before this ran"))
        if isinstance(operation, CreateModel):
            await self._unload_predecessor(model, workers)
            await self._free_base(model, workers, until_settled)
        elif model.state == "creating":
            raise CannotRun(Failure("user", 404, f"model {model.model_id} has not been created"))
        elif not isinstance(operation, UnloadModel):
            await self._ensure_loaded(model, workers, until_settled)
        checkpoint = saved_as(operation)
        overwritten = checkpoint if isinstance(operation, SaveWeights) and operation.overwrite else None
        if overwritten is not None:
            await self._remove_dependence(model, overwritten, workers)
        if checkpoint is not None:
            await self._check_storage(model, checkpoint, operation, workers)
        if isinstance(operation, CreateModel) and operation.checkpoint is not None:
            # The checkpoint may have been renamed since the request was submitted.
            reading = self._state.reads.reading(lambda: model.create.checkpoint)
            operation = replace(operation, checkpoint=await until_settled.enter_async_context(reading))
        elif isinstance(operation, LoadWeights):
            loaded = operation.checkpoint
            await until_settled.enter_async_context(self._state.reads.reading(lambda: loaded))
        if isinstance(operation, CreateModel | LoadWeights) and operation.checkpoint is not None:
            self._require_checkpoint(operation.checkpoint)
        if isinstance(operation, LoadWeights):
            # Recorded before the load runs: from now on, no save may overwrite the checkpoint.
            model.loads[ticket.arrival] = operation.checkpoint
            await self._state.journal.put([stored(model)])
        if overwritten is not None and self._other_dependents(model, overwritten):
            # The last check before the operation is dispatched: any later load runs after this save.
            raise CheckpointInUse(model, overwritten)
        if isinstance(operation, SyncWeights):
            after_step = self._state.open[ticket.request_id].kind == SYNC_AFTER_STEP
            complete = self._state.inference.complete(operation, model, after_step=after_step)
            if complete is None:
                message = "no inference endpoint can receive weights: add a running SGLang server first"
                raise CannotRun(Failure("user", 400, message))
            return complete
        return operation

    def resolve_sampler(self, operation: Sample) -> Sample:
        """The sample with its weights resolved. Raises CannotRun if they no longer exist."""
        sampler = self._resolve(operation.sampler)
        if isinstance(sampler, CheckpointSampler):
            self._require_checkpoint(sampler.checkpoint)
        return replace(operation, sampler=sampler)

    async def check_name(self, request: OpenRequest, operation: Operation, workers: str) -> None:
        """Raise CannotRun if a save would create a checkpoint that already exists. Called just before it is dispatched.

        If an earlier incarnation began this request, a checkpoint of that name was left by that attempt, since the
        name was free when the request first began. It is deleted.
        """
        checkpoint = saved_as(operation)
        if checkpoint is None or (isinstance(operation, SaveWeights) and operation.overwrite):
            return
        folder = self._state.options.folder
        if request.begun_by is None and await asyncio.to_thread(catalogue.find, folder, checkpoint) is not None:
            message = f"checkpoint {checkpoint.uri('xorl')} exists already: choose another name"
            raise CannotRun(Failure("user", 409, message))
        if request.begun_by not in (None, workers):
            await asyncio.to_thread(catalogue.delete, folder, checkpoint)

    async def _unload_predecessor(self, model: ModelRecord, workers: Incarnation) -> None:
        """Unload an earlier model of the same id, and record that before the new one is created."""
        if not model.replaces:
            return
        await workers.run(Work([f"make-way-{secrets.token_hex(8)}"], [UnloadModel(model.model_id)]))
        model.replaces = False
        records = expire_excess(self._state.registry, model.model_id, time.time(), num_kept=0)
        await self._state.journal.put([stored(model), *records])

    async def _ensure_loaded(self, model: ModelRecord, workers: Incarnation, until_settled: AsyncExitStack) -> None:
        """Restore a model that the workers do not hold."""
        state = self._state
        if model.workers == workers.name:
            return
        options, base = state.options, model.create.base_model
        if options.enable_lora and base not in (None, *options.base_names):
            message = (
                f"model {model.model_id} is an adapter over {base!r}, but this service now has {options.model_name!r}: "
                "start the service with that base, or create a new model"
            )
            raise CannotRun(Failure("user", 409, message))
        await self._free_base(model, workers, until_settled)
        try:
            num_replayed = await restore(model, state.journal, state.reads, workers)
        except RecoveryError as problem:
            raise CannotRun(Failure("server", 500, str(problem))) from None
        state.counters.count("restores_total")
        state.counters.count("requests_run_again_total", num_replayed)

    async def _free_base(self, model: ModelRecord, workers: Incarnation, until_settled: AsyncExitStack) -> None:
        """With full weights, only one model can use the base: evict any other one whose client has left.

        The base stays reserved for `model` until its request ends.
        """
        if self._state.options.enable_lora:
            return
        if self._claim is not None and self._claim is not model:
            raise BaseInUse(self._claim)
        found = list(self._state.registry.models.values())
        others = [other for other in found if other is not model and other.workers == workers.name]
        for other in others:
            if not is_client_silent(self._state, other):
                raise BaseInUse(other)
        # Before anything is awaited: a model's record names the workers only once it is on them.
        self._claim = model
        until_settled.callback(self._give_up_claim, model)
        for other in others:
            failure = await self._eviction.evict(other, workers)
            if failure is not None:
                raise CannotRun(failure)

    def _give_up_claim(self, model: ModelRecord) -> None:
        if self._claim is model:
            self._claim = None

    async def _remove_dependence(self, model: ModelRecord, checkpoint: CheckpointRef, workers: Incarnation) -> None:
        """Save a model elsewhere before it overwrites a checkpoint that its creation or its tail reads.

        Otherwise, after a crash, recovery could not tell whether to read the old or the new checkpoint. The model is
        also saved if it reads any checkpoint while other models depend on the overwritten one: those are saved before
        this one continues, and two such models would wait for each other.
        """
        start = None if model.boundary is not None else model.create.checkpoint
        reads = {start, *model.loads.values()} - {None}
        if checkpoint in reads or (reads and self._other_dependents(model, checkpoint)):
            failure = await self._eviction.save_to_recovery(model, workers)
            if failure is not None:
                raise CannotRun(failure)

    def _other_dependents(self, model: ModelRecord, checkpoint: CheckpointRef) -> list[ModelRecord]:
        return [other for other in self._state.registry.dependents(checkpoint) if other is not model]

    async def _check_storage(
        self, model: ModelRecord, checkpoint: CheckpointRef, operation: Operation, workers: Incarnation
    ) -> None:
        """Raise CannotRun if there is no storage for a save; record if it overwrites the model's boundary."""
        like, factor = estimated_size(operation, checkpoint, is_adapter=self._state.options.enable_lora)
        full = await self._eviction.check_storage(model, checkpoint.kind, workers, like, factor)
        if full is not None:
            raise CannotRun(full)
        if checkpoint == model.boundary:
            model.is_overwriting = True
            await self._state.journal.put([stored(model)])

    def _require_checkpoint(self, checkpoint: CheckpointRef) -> None:
        """Raise CannotRun if a checkpoint is an export or does not exist, even if the workers have a copy in memory."""
        state = self._state
        if (refusal := export_refusal(checkpoint)) is not None:
            raise CannotRun(Failure("user", 400, refusal))
        is_known = checkpoint_key(checkpoint) in state.registry.checkpoints
        if not is_known and not checkpoint_folder(state.options.folder, checkpoint).is_dir():
            raise CannotRun(Failure("user", 404, f"there is no checkpoint {checkpoint.uri('xorl')}"))
        if state.is_unavailable(checkpoint):
            reason = "is being deleted" if checkpoint in state.deleting else "has expired"
            raise CannotRun(Failure("user", 404, f"{checkpoint.uri('xorl')} {reason}"))

    def _require_kept(self, sampling_session_id: str, checkpoint: CheckpointRef) -> None:
        """Raise CannotRun if a sampling session's weights were saved without a name and are no longer kept."""
        record = self._state.registry.checkpoints.get(checkpoint_key(checkpoint))
        if is_unnamed(checkpoint) and (record is None or record.has_expired(time.time())):
            message = (
                f"the weights of sampling session {sampling_session_id} are no longer kept: they were saved without a "
                f"name, and model {checkpoint.model_id} has newer ones, was unloaded, or did not use them for "
                f"{KEPT_S / 3600:.0f} hours. Save its weights for sampling again, under a name if they must persist"
            )
            raise CannotRun(Failure("user", 404, message))

    def _resolve(self, sampler: SamplerRef) -> SamplerRef:
        registry = self._state.registry
        if isinstance(sampler, SessionSampler):
            name = sampler.sampling_session_id
            record = registry.samplers.get(name)
            if record is None:
                message = f"sampling session {name} and its weights no longer exist: create it again"
                raise CannotRun(Failure("user", 404, message))
            if record.checkpoint is None:
                return BaseSampler()
            self._require_kept(name, record.checkpoint)
            return CheckpointSampler(record.checkpoint)
        if not isinstance(sampler, NamedSampler):
            return sampler
        named = [
            record
            for record in registry.checkpoints.values()
            if record.checkpoint.name == sampler.name
            and record.checkpoint.kind == "sampler_weights"
            and not self._state.is_unavailable(record.checkpoint)
        ]
        if not named:
            raise CannotRun(Failure("user", 404, f"there are no sampler weights named {sampler.name}"))
        return CheckpointSampler(max(named, key=lambda record: record.created).checkpoint)
