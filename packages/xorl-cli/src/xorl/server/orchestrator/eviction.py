"""Saves models without a client's request, evicts them from the workers without losing anything, and ends models.

Only a model whose session is finished is ended without its client's request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

from msgspec.structs import replace

from xorl.server.identifiers import CheckpointKind, CheckpointRef
from xorl.server.messages import Operation, Result, Work
from xorl.server.operations import Failure, Saved, SaveWeights, UnloadModel
from xorl.server.orchestrator import catalogue, deletion, waiting
from xorl.server.orchestrator.admission import Admission
from xorl.server.orchestrator.apply_result import apply_save
from xorl.server.orchestrator.commit import Damaged, JournalError
from xorl.server.orchestrator.operation_properties import (
    INTERNAL_PREFIX,
    RECOVERY_PREFIX,
    RESERVED_PREFIXES,
    decode_result,
)
from xorl.server.orchestrator.registry import ModelRecord, checkpoint_key, stored
from xorl.server.orchestrator.state import State
from xorl.server.orchestrator.unnamed import expire_excess, expire_with_model
from xorl.server.orchestrator.workers import Incarnation

logger = logging.getLogger(__name__)

# How often `save_dependents` checks whether a model still needs the checkpoint.
DEPENDENT_POLL_S = 1.0


def recovery_save(model: ModelRecord) -> SaveWeights:
    """An internal save of a model. It alternates between two names, so that it never overwrites the boundary."""
    name = f"{RECOVERY_PREFIX}{model.num_recoveries % 2}"
    if model.boundary is not None and model.boundary.name == name:
        name = f"{RECOVERY_PREFIX}{(model.num_recoveries + 1) % 2}"
    return SaveWeights(model.model_id, name, overwrite=True)


async def save_dependents(
    state: State, admission: Admission, checkpoint: CheckpointRef, besides: ModelRecord | None = None
) -> Failure | None:
    """Move the models that depend on a checkpoint off it, by saving each to a recovery checkpoint.

    Returns a failure if a model other than `besides` still depends on it. For lack of storage, it is the same one as of
    other saves.
    """
    for model in state.registry.dependents(checkpoint):
        if model is besides:
            continue
        request_id = await admission.submit_internal(recovery_save(model))
        # Another request may save the model before this save gets its turn.
        while (request := state.open.get(request_id or "")) and model in state.registry.dependents(checkpoint):
            await waiting.wait_for_end(request, DEPENDENT_POLL_S)
        if model in state.registry.dependents(checkpoint):
            needed = f"model {model.model_id} needs {checkpoint.uri('xorl')} to be restored and could not be saved"
            full = _storage_failure(state, request_id)
            if full is not None:
                return replace(full, message=f"{full.message}. {needed} elsewhere before that is overwritten")
            return Failure("server", 503, f"{needed} elsewhere: try again later, or unload the model")
    return None


def _storage_failure(state: State, request_id: str | None) -> Failure | None:
    """The failure of a save, if it failed for lack of storage."""
    found = None if request_id is None else state.journal.find(request_id)
    if found is None or found.result is None:
        return None
    try:
        result = decode_result(found.result)
    except Damaged:
        return None
    return result if isinstance(result, Failure) and result.status == 507 else None


class Eviction:
    """Saves models and evicts them. Methods raise WorkersLost, and JournalError if the journal cannot be written."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._evicting = asyncio.Lock()
        self._reclaiming = asyncio.Lock()

    async def check_storage(
        self,
        model: ModelRecord,
        kind: CheckpointKind,
        workers: Incarnation,
        like: CheckpointKind | None = None,
        factor: int = 1,
    ) -> Failure | None:
        """Called before every save: the failure if there is no storage for another checkpoint of a kind, else None.

        Its size is estimated as `factor` times that of a checkpoint of the kind `like`, by default the same kind. If
        there is too little storage, models of finished sessions are ended to free theirs.
        """
        size = factor * model.checkpoint_bytes.get(like or kind, 0)
        full = await self._storage_problem(kind, size)
        if full is not None and await self._reclaim(full.missing_bytes, model, workers):
            full = await self._storage_problem(kind, size)
        return None if full is None else Failure("user", 507, str(full))

    async def _storage_problem(self, kind: CheckpointKind, size: int) -> catalogue.StorageLimitError | None:
        options = self._state.options
        try:
            await asyncio.to_thread(catalogue.check_storage, options.folder, kind, options.storage_limit_bytes, size)
        except catalogue.StorageLimitError as problem:
            return problem
        return None

    async def _reclaim(self, num_bytes: int, besides: ModelRecord, workers: Incarnation) -> bool:
        """Delete expired checkpoints, and end as many models of finished sessions as needed, least recently used first.

        Returns False, and ends none, if all of them together would not free enough.
        """
        state, now = self._state, time.time()
        chosen: list[ModelRecord] = []
        async with self._reclaiming:
            found = await asyncio.to_thread(catalogue.scan, state.options.folder)
            busy = {request.ticket.lane for request in state.open.values()}
            ended = [
                model
                for model in state.registry.models.values()
                if model is not besides and model.exists and model.lane not in busy
                if state.registry.client_has_left(model)
            ]
            freed = sum(one.size_bytes for one in found if state.registry.has_expired(one.checkpoint, now))
            for model in sorted(ended, key=state.registry.last_activity):
                if freed >= num_bytes:
                    break
                chosen.append(model)
                freed += sum(one.size_bytes for one in found if self._ends_with(model, one.checkpoint))
            if freed < num_bytes:
                return False
            for model in chosen:
                await self._end(model, workers)
            # The caller itself may be saving under the name of an expired checkpoint.
            await deletion.delete_expired(state, time.time(), waits=False)
        return True

    def _ends_with(self, model: ModelRecord, checkpoint: CheckpointRef) -> bool:
        """Whether a checkpoint is deleted when its model ends."""
        record = self._state.registry.checkpoints.get(checkpoint_key(checkpoint))
        is_own = checkpoint.name.startswith(RESERVED_PREFIXES) or (record is not None and record.is_initial)
        return checkpoint.model_id == model.model_id and is_own

    async def _end(self, model: ModelRecord, workers: Incarnation) -> None:
        """End a model that has no requests, and delete the files that only its recovery needs."""
        state = self._state
        if not model.exists or any(request.ticket.lane == model.lane for request in state.open.values()):
            return
        before = (model.state, model.workers, model.replaces)
        was_loaded = model.workers == workers.name
        # Before the first await, so that no further request for the model is accepted.
        model.state, model.workers, model.replaces = "unloaded", None, model.replaces or was_loaded
        state.scheduler.close_lane(model.lane)
        try:
            records = expire_with_model(state.registry, model.model_id, time.time())
            await state.journal.settle(model.lane, [stored(model), *records], cuts="all")
        except JournalError:
            model.state, model.workers, model.replaces = before
            state.scheduler.open_lane(model.lane, model.next_seq)
            raise
        logger.info("event=ended model=%s why='its session is finished, and a save needs the storage'", model.model_id)
        if was_loaded:
            await _run_internal(UnloadModel(model.model_id), workers)
        await self.delete_obsolete(model)

    async def save_if_changed(self, model: ModelRecord, workers: Incarnation) -> Failure | None:
        """Save a model unless its boundary already holds everything except the accumulated gradient."""
        if not self._state.journal.num_settled(model.lane):
            return None
        return await self.save_to_recovery(model, workers)

    async def save_to_recovery(self, model: ModelRecord, workers: Incarnation) -> Failure | None:
        """Save a model to a recovery checkpoint, which becomes its boundary."""
        state = self._state
        full = await self.check_storage(model, "weights", workers)
        if full is not None:
            return full
        save = recovery_save(model)
        result = await _run_internal(save, workers)
        if not isinstance(result, Saved):
            return result if isinstance(result, Failure) else Failure("server", 500, f"not saved: {result}")
        apply_save(state, model, save, result, is_internal=True)
        await state.journal.settle(model.lane, [stored(model)])
        await self.delete_obsolete(model)
        return None

    async def delete_obsolete(self, model: ModelRecord) -> None:
        """Delete a model's recovery checkpoints except its boundary. The journal must already have the boundary."""
        for number in range(2):
            recovery = CheckpointRef(model.model_id, "weights", f"{RECOVERY_PREFIX}{number}")
            is_obsolete = recovery != model.boundary or not model.exists
            if is_obsolete and not self._state.registry.dependents(recovery):
                try:
                    await asyncio.to_thread(catalogue.delete, self._state.options.folder, recovery)
                except (OSError, ValueError) as problem:
                    # It only takes up storage.
                    logger.warning("event=not_deleted checkpoint=%s why=%r", recovery.uri("xorl"), str(problem))
        await deletion.delete_kept(self._state)

    async def evict(self, model: ModelRecord, workers: Incarnation) -> Failure | None:
        """Save a model if necessary and unload it from the workers. Its next request restores it."""
        # Housekeeping and a request that needs the base may both evict it; the second call then has nothing to do.
        async with self._evicting:
            if not model.exists:
                return None
            if model.workers == workers.name:
                failure = await self.save_if_changed(model, workers)
                if failure is not None:
                    return failure
                await _run_internal(UnloadModel(model.model_id), workers)
            model.state, model.workers = "released", None
            records = [stored(model)]
            if self._state.registry.client_has_left(model):
                records += expire_excess(self._state.registry, model.model_id, time.time(), num_kept=0)
            await self._state.journal.put(records)
        logger.info("event=released model=%s", model.model_id)
        return None


async def _run_internal(operation: Operation, workers: Incarnation) -> Result:
    name = f"{INTERNAL_PREFIX}{secrets.token_hex(8)}"
    return (await workers.run(Work([name], [operation]))).results[0]
