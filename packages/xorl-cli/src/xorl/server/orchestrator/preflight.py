"""What must be true before a request can run: its model is on the workers, a save has room, a sampler is found."""

from __future__ import annotations

import asyncio
import secrets

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
    SnapshotSampler,
    SyncWeights,
    UnloadModel,
)
from xorl.server.orchestrator import catalogue
from xorl.server.orchestrator.calls import AFTER_STEP, kept_size, saved_as
from xorl.server.orchestrator.eviction import Eviction, silence_of
from xorl.server.orchestrator.lane import Ticket
from xorl.server.orchestrator.recovery import RecoveryError, restore
from xorl.server.orchestrator.registry import ModelRecord, SamplerRecord, checkpoint_key, stored
from xorl.server.orchestrator.state import OpenRequest, State
from xorl.server.orchestrator.workers import Incarnation


class CannotRun(Exception):
    """A request that ends without the workers; `failure` is its result."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class CheckpointInUse(Exception):
    """A save would overwrite a checkpoint from which other models would be made again: save those elsewhere first."""

    def __init__(self, model: ModelRecord, checkpoint: CheckpointRef) -> None:
        super().__init__(checkpoint.uri("xorl"))
        self.model = model
        self.checkpoint = checkpoint


class Preflight:
    """Makes sure that the workers can run a request, before they get it."""

    def __init__(self, state: State, models: Eviction) -> None:
        self._state = state
        self._models = models

    def over_initial(self, operation: Operation) -> Operation:
        """The operation, but a save under the name of the service's own initial checkpoint may overwrite that one."""
        checkpoint = saved_as(operation)
        if isinstance(operation, SaveWeights) and checkpoint is not None:
            record = self._state.registry.checkpoints.get(checkpoint_key(checkpoint))
            if record is not None and record.is_initial:
                return replace(operation, overwrite=True)
        return operation

    async def prepare(self, ticket: Ticket, operation: Operation, workers: Incarnation) -> Operation:
        """The operation as the workers get it.

        Raises CannotRun if it ends without them, CheckpointInUse if it would write over what other models need.
        """
        if isinstance(operation, Sample):
            return self.with_weights(operation, workers)
        model = self._state.model_of(ticket)
        if model is None or not model.is_there:
            raise CannotRun(Failure("user", 410, "the model was unloaded or created anew before this ran"))
        await self._bring(model, operation, workers)
        checkpoint = saved_as(operation)
        replaced = checkpoint if isinstance(operation, SaveWeights) and operation.overwrite else None
        if replaced is not None:
            await self._free_of_own(model, replaced, workers)
        if checkpoint is not None:
            await self._make_room(model, checkpoint, operation)
        if isinstance(operation, CreateModel | LoadWeights) and operation.checkpoint is not None:
            self._require(operation.checkpoint)
        if isinstance(operation, LoadWeights):
            # Before it runs: from then on nobody may write over what it loads.
            model.loads = [*{*model.loads, operation.checkpoint}]
            await self._state.journal.put([stored(model)])
        if replaced is not None and self._others(model, replaced):
            # The last check, directly before the workers get the operation: who loads it from now on does so after it.
            raise CheckpointInUse(model, replaced)
        if isinstance(operation, SyncWeights):
            return self._with_receivers(operation, model, ticket)
        return operation

    def with_weights(self, operation: Sample, workers: Incarnation | None) -> Sample:
        """A sample with the weights that it is of. Raises CannotRun if nobody has them.

        Without `workers`, they need not be in these: an inference endpoint may hold them still.
        """
        sampler = self._resolve(operation.sampler, workers)
        if isinstance(sampler, CheckpointSampler):
            self._require(sampler.checkpoint)
        return replace(operation, sampler=sampler)

    async def _bring(self, model: ModelRecord, operation: Operation, workers: Incarnation) -> None:
        """Have the workers hold what the operation works on: its model, or for a new model, room for it."""
        if isinstance(operation, CreateModel):
            await self._make_way(model, workers)
            await self._make_place(model, workers)
        elif model.state == "creating":
            raise CannotRun(Failure("user", 404, f"model {model.model_id} has not been created"))
        elif not isinstance(operation, UnloadModel):
            await self._make_present(model, workers)

    async def check_begin(self, request: OpenRequest, operation: Operation, workers: str) -> None:
        """Called just before the workers get a save: raises CannotRun if a checkpoint of that name exists already.

        If the request was begun by workers that are gone, a checkpoint there is their work for this same request,
        since its name was free when it first began: it is removed.
        """
        checkpoint = saved_as(operation)
        if checkpoint is None or (isinstance(operation, SaveWeights) and operation.overwrite):
            return
        folder = self._state.options.folder
        if request.begun_by is None and await asyncio.to_thread(catalogue.find, folder, checkpoint) is not None:
            message = f"there is a checkpoint {checkpoint.uri('xorl')} already: choose another name"
            raise CannotRun(Failure("user", 409, message))
        if request.begun_by not in (None, workers):
            await asyncio.to_thread(catalogue.delete, folder, checkpoint)

    async def _make_way(self, model: ModelRecord, workers: Incarnation) -> None:
        """Take an earlier model of the same id off the workers, and record that before the new one is made."""
        if not model.replaces:
            return
        await workers.run(Work([f"make-way-{secrets.token_hex(8)}"], [UnloadModel(model.model_id)]))
        model.replaces = False
        await self._state.journal.put([stored(model), *self._state.registry.drop_snapshots(model.model_id)])

    async def _make_present(self, model: ModelRecord, workers: Incarnation) -> None:
        state = self._state
        if model.workers == workers.name:
            return
        options, base = state.options, model.create.base_model
        if options.enable_lora and base not in (None, options.model_name, options.model_path):
            message = (
                f"model {model.model_id} is an adapter over {base!r}, and this service has {options.model_name!r} now: "
                "start it with that base, or create a model anew"
            )
            raise CannotRun(Failure("user", 409, message))
        await self._make_place(model, workers)
        try:
            # What workers may still hold of it is dropped first, with the weights of samplers.
            await state.journal.put(state.registry.drop_snapshots(model.model_id))
            again = await restore(model, state.journal, workers)
        except RecoveryError as problem:
            raise CannotRun(Failure("server", 500, str(problem))) from None
        state.tally.count("restores_total")
        state.tally.count("requests_run_again_total", again)

    async def _make_place(self, model: ModelRecord, workers: Incarnation) -> None:
        """With full weights, a single model has the base. Another one is set aside if its client has gone."""
        if self._state.options.enable_lora:
            return
        for other in self._state.registry.models.values():
            if other is model or other.workers != workers.name:
                continue
            if not self._models.is_silent(other):
                message = (
                    f"model {other.model_id} has the base, and its client is there: unload it, or close that client; "
                    f"one that is gone makes way after {silence_of(other):.0f} s"
                )
                raise CannotRun(Failure("user", 409, message))
            failure = await self._models.set_aside(other, workers)
            if failure is not None:
                raise CannotRun(failure)

    async def _free_of_own(self, model: ModelRecord, checkpoint: CheckpointRef, workers: Incarnation) -> None:
        """Save a model elsewhere before it overwrites a checkpoint that its creation or its tail reads.

        After a crash, nobody could tell whether these have to read the old or the new checkpoint. It is also saved if
        it reads any checkpoint while other models need the one to be overwritten: a model that waits until others are
        saved must not be one that they wait for.
        """
        start = None if model.boundary is not None else model.create.checkpoint
        reads = {start, *model.loads} - {None}
        if checkpoint in reads or (reads and self._others(model, checkpoint)):
            failure = await self._models.save_elsewhere(model, workers)
            if failure is not None:
                raise CannotRun(failure)

    def _others(self, model: ModelRecord, checkpoint: CheckpointRef) -> list[ModelRecord]:
        return [other for other in self._state.registry.readers(checkpoint) if other is not model]

    async def _make_room(self, model: ModelRecord, checkpoint: CheckpointRef, operation: Operation) -> None:
        like, times = kept_size(operation, checkpoint, is_adapter=self._state.options.enable_lora)
        full = await self._models.check_room(model, checkpoint.kind, like, times)
        if full is not None:
            raise CannotRun(full)
        if checkpoint == model.boundary:
            model.is_overwriting = True
            await self._state.journal.put([stored(model)])

    def _require(self, checkpoint: CheckpointRef) -> None:
        state = self._state
        is_known = checkpoint_key(checkpoint) in state.registry.checkpoints
        # Workers may still hold what was deleted, and would sample from it until they are started anew.
        if not is_known and not checkpoint_folder(state.options.folder, checkpoint).is_dir():
            raise CannotRun(Failure("user", 404, f"there is no checkpoint {checkpoint.uri('xorl')}"))
        if state.is_gone(checkpoint):
            why = "is being deleted" if checkpoint in state.deleting else "is there no more: its time is over"
            raise CannotRun(Failure("user", 404, f"{checkpoint.uri('xorl')} {why}"))

    def _resolve(self, sampler: SamplerRef, workers: Incarnation | None) -> SamplerRef:
        registry = self._state.registry
        if isinstance(sampler, SessionSampler):
            name = sampler.sampling_session_id
            record = registry.samplers.get(name)
            if record is None:
                message = f"sampling session {name} is not kept any more, its weights are gone: make it again"
                raise CannotRun(Failure("user", 404, message))
            return _weights_of(record, workers)
        if not isinstance(sampler, NamedSampler):
            return sampler
        named = [
            record
            for record in registry.checkpoints.values()
            if record.checkpoint.name == sampler.name
            and record.checkpoint.kind == "sampler_weights"
            and not self._state.is_gone(record.checkpoint)
        ]
        if not named:
            raise CannotRun(Failure("user", 404, f"there are no sampler weights of the name {sampler.name}"))
        return CheckpointSampler(max(named, key=lambda record: record.created).checkpoint)

    def _with_receivers(self, operation: SyncWeights, model: ModelRecord, ticket: Ticket) -> SyncWeights:
        is_own = self._state.open[ticket.request_id].kind == AFTER_STEP
        complete = self._state.inference.complete(operation, model, after_step=is_own)
        if complete is None:
            message = "no inference endpoint takes weights: add one, an SGLang server that answers, first"
            raise CannotRun(Failure("user", 400, message))
        return complete


def _weights_of(record: SamplerRecord, workers: Incarnation | None) -> SamplerRef:
    if record.checkpoint is not None:
        return CheckpointSampler(record.checkpoint)
    if record.snapshot_of is None:
        return BaseSampler()
    if workers is not None and record.workers != workers.name:
        message = (
            f"the weights of sampling session {record.sampling_session_id} were in the workers' memory alone, and are "
            f"gone: the workers were started anew, or model {record.snapshot_of} was taken off them (unloaded, idle, "
            "or after a step or a load that failed half way). Save its weights for sampling again, under a name if "
            "they are to be kept"
        )
        raise CannotRun(Failure("user", 404, message))
    return SnapshotSampler(record.snapshot_of, record.sampling_session_id)
