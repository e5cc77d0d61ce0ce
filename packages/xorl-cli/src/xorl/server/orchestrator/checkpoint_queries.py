"""Checkpoints and training runs as clients ask for them: what lies in the output folder, with what is known of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from xorl.server.identifiers import CheckpointRef
from xorl.server.messages import Ok, Rejected
from xorl.server.operations import LoraSpec
from xorl.server.orchestrator import catalogue, waiting
from xorl.server.orchestrator.admission import Admission
from xorl.server.orchestrator.calls import RECOVERY_PREFIX
from xorl.server.orchestrator.catalogue import Found
from xorl.server.orchestrator.commit import JournalError
from xorl.server.orchestrator.eviction import recovery_save
from xorl.server.orchestrator.registry import CheckpointRecord, ModelRecord, checkpoint_key, dropped, stored
from xorl.server.orchestrator.state import State
from xorl.server.queries import (
    CheckpointInfo,
    CheckpointList,
    DeleteCheckpoint,
    GetTrainingRun,
    GetWeightsInfo,
    ListCheckpoints,
    ListTrainingRuns,
    SetCheckpointTtl,
    TrainingRun,
    TrainingRuns,
    WeightsInfo,
)

logger = logging.getLogger(__name__)

# How often it is looked whether a model still needs a checkpoint, while its save waits for its turn.
READERS_EVERY_S = 1.0


async def list_checkpoints(state: State, ask: ListCheckpoints) -> CheckpointList:
    """Newest first; without those that the service makes to recover from."""
    found = await _scan(state, ask.model_id)
    last = None if ask.limit is None else ask.offset + ask.limit
    return CheckpointList([_info(state, one) for one in found[ask.offset : last]], len(found))


async def delete_checkpoint(state: State, admission: Admission, ask: DeleteCheckpoint) -> Ok | Rejected:
    """Remove a checkpoint; models that would be made again from it are saved elsewhere first."""
    while (problem := await save_readers(state, admission, ask.checkpoint)) is None:
        async with state.naming(ask.checkpoint):
            # A save under its name may have been the last to have it.
            if not state.registry.readers(ask.checkpoint):
                return await _remove(state, ask.checkpoint)
    return Rejected(503, problem)


async def _remove(state: State, checkpoint: CheckpointRef) -> Ok | Rejected:
    """Remove what has a name; within `State.naming`."""
    # At once, so that nobody comes to need it between the question and the end.
    state.deleting.add(checkpoint)
    try:
        was_there = await asyncio.to_thread(catalogue.delete, state.options.folder, checkpoint)
    finally:
        state.deleting.discard(checkpoint)
    if not was_there:
        return _missing(checkpoint)
    record = state.registry.checkpoints.pop(checkpoint_key(checkpoint), None)
    if record is not None:
        await state.journal.put([dropped(record)])
    return Ok()


async def save_readers(
    state: State, admission: Admission, checkpoint: CheckpointRef, besides: ModelRecord | None = None
) -> str | None:
    """Save the models that would be made again from a checkpoint elsewhere; says which one cannot be, if any."""
    for model in state.registry.readers(checkpoint):
        if model is besides:
            continue
        request_id = await admission.submit_own(recovery_save(model))
        # It may be saved before that, in the turn of another request.
        while request_id is not None and request_id in state.open and model in state.registry.readers(checkpoint):
            await waiting.ended(state, request_id, within_s=READERS_EVERY_S)
        if model in state.registry.readers(checkpoint):
            why = f"model {model.model_id} comes back from {checkpoint.uri('xorl')} if the workers are lost"
            return f"{why}, and cannot be saved elsewhere: try again later, or unload it"
    return None


async def delete_expired(state: State, admission: Admission, now: float) -> None:
    """Remove the checkpoints whose time is over."""
    for record in [record for record in state.registry.checkpoints.values() if record.is_over(now)]:
        try:
            problem = await save_readers(state, admission, record.checkpoint)
            async with state.naming(record.checkpoint):
                if state.registry.checkpoints.get(record.key) is not record:
                    # Another one was saved in its place meanwhile.
                    continue
                answer = await _remove(state, record.checkpoint) if problem is None else Rejected(503, problem)
                logger.info("event=expired checkpoint=%s answer=%r", record.checkpoint.uri("xorl"), answer)
                if isinstance(answer, Rejected) and answer.status == 404:
                    # Somebody was faster.
                    state.registry.checkpoints.pop(record.key, None)
                    await state.journal.put([dropped(record)])
        except (JournalError, OSError) as problem:
            # It is tried again, and keeps no other one.
            logger.error("event=not_expired checkpoint=%s why=%r", record.checkpoint.uri("xorl"), str(problem))


async def set_ttl(state: State, ask: SetCheckpointTtl) -> Ok | Rejected:
    """When to delete a checkpoint."""
    found = find(state, ask.checkpoint)
    if found is None:
        return _missing(ask.checkpoint)
    record = _record(state, found)
    record.expires = None if ask.ttl_s is None else time.time() + ask.ttl_s
    state.registry.checkpoints[record.key] = record
    await state.journal.put([stored(record)])
    return Ok()


async def weights_info(state: State, ask: GetWeightsInfo) -> WeightsInfo | Rejected:
    """What a checkpoint is of."""
    found = find(state, ask.checkpoint)
    if found is None:
        return _missing(ask.checkpoint)
    record = _record(state, found)
    return WeightsInfo(record.base_model, record.lora, found.size_bytes, record.num_steps)


def find(state: State, checkpoint: CheckpointRef) -> Found | None:
    """A checkpoint, if it is there for clients."""
    return None if state.is_gone(checkpoint) else catalogue.find(state.options.folder, checkpoint)


async def list_training_runs(state: State, ask: ListTrainingRuns) -> TrainingRuns:
    """Models that are there or have left checkpoints, those active last first."""
    runs = await _runs(state)
    return TrainingRuns(runs[ask.offset : ask.offset + ask.limit], len(runs))


async def get_training_run(state: State, ask: GetTrainingRun) -> TrainingRun | Rejected:
    """One of them."""
    runs = [run for run in await _runs(state, ask.model_id) if run.model_id == ask.model_id]
    return runs[0] if runs else Rejected(404, f"there is no training run {ask.model_id}")


async def _runs(state: State, model_id: str | None = None) -> list[TrainingRun]:
    newest: dict[str, dict[str, Found]] = {}
    for found in await _scan(state, model_id):
        newest.setdefault(found.checkpoint.model_id, {}).setdefault(found.checkpoint.kind, found)
    known = state.registry.models
    runs = [_run(state, name, newest.get(name, {})) for name in {*newest, *known} if model_id in (None, name)]
    return sorted(runs, key=lambda run: run.last_active, reverse=True)


def _run(state: State, model_id: str, newest: dict[str, Found]) -> TrainingRun:
    model = state.registry.models.get(model_id)
    trained, sampled = newest.get("weights"), newest.get("sampler_weights")
    last = max((one.created for one in newest.values()), default=0.0)
    records = [_record(state, one) for one in newest.values()]
    lora = model.lora if model is not None else next((r.lora for r in records if r.lora is not None), None)
    return TrainingRun(
        model_id,
        state.options.model_name if model is not None else next(r.base_model for r in records),
        lora.rank if lora is not None else None,
        max(model.last_active, last) if model is not None else last,
        None if trained is None else _info(state, trained),
        None if sampled is None else _info(state, sampled),
        {} if model is None else model.create.user_metadata,
    )


async def _scan(state: State, model_id: str | None) -> list[Found]:
    found = await asyncio.to_thread(catalogue.scan, state.options.folder, model_id)
    theirs = [one for one in found if not one.checkpoint.name.startswith(RECOVERY_PREFIX)]
    return [one for one in theirs if not state.is_gone(one.checkpoint)]


def _info(state: State, found: Found) -> CheckpointInfo:
    record = _record(state, found)
    return CheckpointInfo(found.checkpoint, found.created, found.size_bytes, record.user_metadata, record.expires)


async def adopt(state: State) -> None:
    """Know the checkpoints that lie in the output folder and not in the journal, which may be a new one.

    What they are their manifests say; exports have none.
    """
    folder, known = state.options.folder, state.registry.checkpoints
    for ref in await asyncio.to_thread(catalogue.names, folder):
        is_own = ref.name.startswith(RECOVERY_PREFIX)
        if ref.kind != "external_weights" and not is_own and checkpoint_key(ref) not in known:
            found = await asyncio.to_thread(catalogue.find, folder, ref)
            record = None if found is None else await asyncio.to_thread(_described, state, found)
            if record is not None:
                known[record.key] = record
                logger.info("event=adopted checkpoint=%s", ref.uri("xorl"))
                await state.journal.put([stored(record)])


def _described(state: State, found: Found) -> CheckpointRecord | None:
    manifest = catalogue.manifest(state.options.folder, found.checkpoint)
    try:
        info = manifest["info"]["service"]
        return CheckpointRecord(
            found.checkpoint,
            found.created,
            info["base"]["name"],
            None if info["lora"] is None else _lora(info["lora"]),
            int(manifest["step"]),
            info["user_metadata"],
        )
    except (KeyError, TypeError, ValueError):
        return None


def _lora(saved: Mapping[str, Any]) -> LoraSpec:
    spec, parts = saved["spec"], saved["parts"]
    return LoraSpec(spec["rank"], spec["alpha"], saved["seed"], "attn" in parts, "mlp" in parts, "unembed" in parts)


def _record(state: State, found: Found) -> CheckpointRecord:
    """What is known of a checkpoint; of one that came while the service ran, only what can be told without it."""
    record = state.registry.checkpoints.get(checkpoint_key(found.checkpoint))
    if record is not None:
        return record
    model = state.registry.models.get(found.checkpoint.model_id)
    lora = None if model is None else model.lora
    return CheckpointRecord(found.checkpoint, found.created, state.options.model_name, lora, 0)


def _missing(checkpoint: CheckpointRef) -> Rejected:
    return Rejected(404, f"there is no checkpoint {checkpoint.uri('xorl')}")
