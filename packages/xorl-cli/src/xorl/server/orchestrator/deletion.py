"""Deletes checkpoints. If a model needs a checkpoint for recovery, it is kept under a hidden name until no model does.

Keeping a checkpoint only renames its folder, so deletion works even if the disk is full.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence

from xorl.server.identifiers import CheckpointRef
from xorl.server.messages import Ok, Rejected
from xorl.server.orchestrator import catalogue
from xorl.server.orchestrator.commit import JournalError
from xorl.server.orchestrator.operation_properties import RECOVERY_PREFIX
from xorl.server.orchestrator.registry import KeptRecord, ModelRecord, checkpoint_key, deleted, stored
from xorl.server.orchestrator.state import State
from xorl.server.queries import DeleteCheckpoint

logger = logging.getLogger(__name__)


async def delete_checkpoint(state: State, query: DeleteCheckpoint) -> Ok | Rejected:
    """Delete a client's checkpoint."""
    checkpoint = query.checkpoint
    if checkpoint.name.startswith(RECOVERY_PREFIX):
        return _missing(checkpoint)
    async with state.checkpoint_lock(checkpoint):
        try:
            existed = await delete(state, checkpoint)
        except OSError as problem:
            return Rejected(507, f"{checkpoint.uri('xorl')} could not be deleted: {problem}")
    return Ok() if existed else _missing(checkpoint)


async def delete(state: State, checkpoint: CheckpointRef) -> bool:
    """Delete a checkpoint and its record; False if it does not exist. The caller holds its `State.checkpoint_lock`.

    Raises OSError or JournalError; then the checkpoint and its record are either unchanged, or will both be deleted
    soon.
    """
    # Set before the first await, so that no request starts to depend on it after this check.
    state.deleting.add(checkpoint)
    try:
        if state.registry.dependents(checkpoint):
            existed = await _keep(state, checkpoint)
        else:
            existed = await asyncio.to_thread(catalogue.delete, state.options.folder, checkpoint)
        record = state.registry.checkpoints.pop(checkpoint_key(checkpoint), None)
        if record is not None:
            await state.journal.put([deleted(record)])
        return existed
    finally:
        state.deleting.discard(checkpoint)


async def delete_expired(state: State, now: float, *, waits: bool = True) -> None:
    """Delete the checkpoints that have expired at `now`, and kept checkpoints that no model needs any more.

    waits: whether to wait for requests that are saving under a checkpoint's name; otherwise it is skipped.
    """
    for record in [record for record in state.registry.checkpoints.values() if record.has_expired(now)]:
        if not waits and state.is_locked(record.checkpoint):
            continue
        try:
            async with state.checkpoint_lock(record.checkpoint):
                if state.registry.checkpoints.get(record.key) is not record:
                    # A new checkpoint has been saved under this name.
                    continue
                existed = await delete(state, record.checkpoint)
                logger.info("event=expired checkpoint=%s existed=%s", record.checkpoint.uri("xorl"), existed)
        except (JournalError, OSError) as problem:
            # Continue with the others; housekeeping retries this one.
            logger.error("event=not_expired checkpoint=%s why=%r", record.checkpoint.uri("xorl"), str(problem))
    await delete_kept(state)


async def delete_kept(state: State) -> None:
    """Delete the kept checkpoints that no model needs any more."""
    if state.keeping.locked():
        # Do not wait, since the holder of the lock may be waiting for the caller. Housekeeping calls this again.
        return
    async with state.keeping:
        for record in list(state.registry.kept.values()):
            if not state.registry.dependents(record.kept):
                try:
                    await asyncio.to_thread(catalogue.delete, state.options.folder, record.kept)
                    del state.registry.kept[record.key]
                    await state.journal.put([deleted(record)])
                except (OSError, JournalError) as problem:
                    logger.warning("event=not_deleted checkpoint=%s why=%r", record.kept.uri("xorl"), str(problem))


async def finish_keeping(state: State) -> None:
    """At startup, rename checkpoints that an orchestrator recorded as kept, but did not rename before it died."""
    folder, registry = state.options.folder, state.registry
    for record in registry.kept.values():
        # If the original has a record, it is a newer checkpoint of that name.
        is_renamed = catalogue.find(folder, record.kept) is not None or checkpoint_key(record.original) in (
            registry.checkpoints
        )
        if not is_renamed and catalogue.find(folder, record.original) is not None:
            await asyncio.to_thread(catalogue.rename, folder, record.original, record.kept)
            logger.info("event=kept checkpoint=%s as=%s", record.original.uri("xorl"), record.kept.uri("xorl"))


async def _keep(state: State, checkpoint: CheckpointRef) -> bool:
    """Rename a checkpoint, and point the models that depend on it to the new name; clients no longer see it."""
    folder, registry = state.options.folder, state.registry
    if not catalogue.exists(folder, checkpoint):
        return False
    kept = CheckpointRef(checkpoint.model_id, checkpoint.kind, f"{RECOVERY_PREFIX}{secrets.token_hex(8)}")
    async with state.keeping, state.reads.paused(checkpoint):
        models = registry.dependents(checkpoint)
        record, hidden = KeptRecord(kept, checkpoint), registry.checkpoints.pop(checkpoint_key(checkpoint), None)
        registry.kept[record.key] = record
        _redirect(models, checkpoint, kept)
        try:
            gone = [] if hidden is None else [deleted(hidden)]
            # Write the journal first: the next start completes a rename that is recorded there.
            await state.journal.put([*map(stored, models), stored(record), *gone])
            await asyncio.to_thread(catalogue.rename, folder, checkpoint, kept)
        except (JournalError, OSError):
            _redirect(models, kept, checkpoint)
            del registry.kept[record.key]
            if hidden is not None:
                registry.checkpoints[hidden.key] = hidden
            known = [] if hidden is None else [stored(hidden)]
            await state.journal.put([*map(stored, models), deleted(record), *known])
            raise
    logger.info("event=kept checkpoint=%s as=%s", checkpoint.uri("xorl"), kept.uri("xorl"))
    return True


def _redirect(models: Sequence[ModelRecord], old: CheckpointRef, new: CheckpointRef) -> None:
    for model in models:
        model.redirect(old, new)


def _missing(checkpoint: CheckpointRef) -> Rejected:
    return Rejected(404, f"there is no checkpoint {checkpoint.uri('xorl')}")
