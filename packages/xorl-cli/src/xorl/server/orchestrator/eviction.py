"""Saves models on the service's own behalf, and takes them off the workers without losing anything."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

from xorl.server.identifiers import CheckpointKind, CheckpointRef
from xorl.server.messages import Operation, Result, Work
from xorl.server.operations import Failure, Saved, SaveWeights, UnloadModel
from xorl.server.orchestrator import catalogue
from xorl.server.orchestrator.calls import OWN_PREFIX, RECOVERY_PREFIX, RELEASE
from xorl.server.orchestrator.effects import Effects
from xorl.server.orchestrator.registry import ModelRecord, stored
from xorl.server.orchestrator.state import State
from xorl.server.orchestrator.workers import Incarnation

logger = logging.getLogger(__name__)

# Clients with a session send heartbeats every ten seconds, and warn their user after this long without an answer.
SILENT_S = 120.0
# A client without heartbeats may be busy with its last result.
SILENT_ALONE_S = 600.0


def silence_of(model: ModelRecord) -> float:
    """How many seconds without a word mean that a model's client has gone."""
    return SILENT_S if model.session_id is not None else SILENT_ALONE_S


def recovery_save(model: ModelRecord) -> SaveWeights:
    """A save by the service itself, to one of two names in turn, so that the boundary is never overwritten."""
    name = f"{RECOVERY_PREFIX}{model.num_recoveries % 2}"
    if model.boundary is not None and model.boundary.name == name:
        name = f"{RECOVERY_PREFIX}{(model.num_recoveries + 1) % 2}"
    return SaveWeights(model.model_id, name, overwrite=True)


class Eviction:
    """Saves models and takes them off the workers. Raises WorkersLost, and JournalError if the journal fails."""

    def __init__(self, state: State, effects: Effects) -> None:
        self._state = state
        self._effects = effects
        self._setting_aside = asyncio.Lock()

    def is_silent(self, model: ModelRecord) -> bool:
        """Whether a model's client seems to have gone, and waits for nothing."""
        registry, requests = self._state.registry, self._state.open.values()
        waits = any(request.ticket.lane == model.lane and request.kind != RELEASE for request in requests)
        return not waits and (registry.has_left(model) or time.time() - registry.activity(model) > silence_of(model))

    async def check_room(
        self, model: ModelRecord, kind: CheckpointKind, like: CheckpointKind | None = None, times: int = 1
    ) -> Failure | None:
        """Why there is no room for one more checkpoint of a kind, if there is none; asked before every save.

        The checkpoint takes `times` the size of one of the kind `like`, by default of its own kind.
        """
        options = self._state.options
        wanted = times * model.checkpoint_bytes.get(like or kind, 0)
        try:
            await asyncio.to_thread(catalogue.check_room, options.folder, kind, options.storage_limit_bytes, wanted)
        except catalogue.StorageLimitError as problem:
            return Failure("user", 507, str(problem))
        return None

    async def save(self, model: ModelRecord, workers: Incarnation) -> Failure | None:
        """Save a model, so that only a pending gradient is left in its tail; does nothing if that is so already."""
        if not self._state.journal.num_settled(model.lane):
            return None
        return await self.save_elsewhere(model, workers)

    async def save_elsewhere(self, model: ModelRecord, workers: Incarnation) -> Failure | None:
        """The same, also where the boundary is there: it is in a checkpoint of the service's own afterwards."""
        state = self._state
        full = await self.check_room(model, "weights")
        if full is not None:
            return full
        save = recovery_save(model)
        result = await _work(save, workers)
        if not isinstance(result, Saved):
            return result if isinstance(result, Failure) else Failure("server", 500, f"not saved: {result}")
        self._effects.saved(model, save, result, workers.name, is_own=True)
        await state.journal.settle(model.lane, [stored(model)])
        await self.drop_obsolete(model)
        return None

    async def drop_obsolete(self, model: ModelRecord) -> None:
        """Delete the service's own checkpoints of a model but its boundary, which the journal has already."""
        for number in range(2):
            own = CheckpointRef(model.model_id, "weights", f"{RECOVERY_PREFIX}{number}")
            if (own != model.boundary or not model.is_there) and not self._state.registry.readers(own):
                try:
                    await asyncio.to_thread(catalogue.delete, self._state.options.folder, own)
                except (OSError, ValueError) as problem:
                    # It takes room and is in nobody's way.
                    logger.warning("event=not_deleted checkpoint=%s why=%r", own.uri("xorl"), str(problem))

    async def set_aside(self, model: ModelRecord, workers: Incarnation) -> Failure | None:
        """Save a model, unless a checkpoint has it, and free what it holds; it comes back when it is called."""
        # The clock may want the same as who needs the place: the second finds it done.
        async with self._setting_aside:
            if model.workers == workers.name:
                failure = await self.save(model, workers)
                if failure is not None:
                    return failure
                await _work(UnloadModel(model.model_id), workers)
            model.state, model.workers = "released", None
            await self._state.journal.put([stored(model), *self._state.registry.drop_snapshots(model.model_id)])
        logger.info("event=released model=%s", model.model_id)
        return None


async def _work(operation: Operation, workers: Incarnation) -> Result:
    name = f"{OWN_PREFIX}{secrets.token_hex(8)}"
    return (await workers.run(Work([name], [operation]))).results[0]
