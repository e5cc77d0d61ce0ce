"""Answers clients' queries about checkpoints and training runs; `deletion` deletes checkpoints.

It combines the folders on disk with the records of the registry.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from xorl.server.identifiers import CheckpointRef
from xorl.server.messages import Ok, Rejected
from xorl.server.operations import LoraSpec
from xorl.server.orchestrator import catalogue
from xorl.server.orchestrator.catalogue import CheckpointFolder
from xorl.server.orchestrator.operation_properties import RESERVED_PREFIXES, UNNAMED_PREFIX
from xorl.server.orchestrator.registry import CheckpointRecord, checkpoint_key, stored
from xorl.server.orchestrator.state import State
from xorl.server.orchestrator.unnamed import is_unnamed
from xorl.server.queries import (
    CheckpointInfo,
    CheckpointList,
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


async def list_checkpoints(state: State, query: ListCheckpoints) -> CheckpointList:
    """Checkpoints, newest first, without those under the service's own names."""
    found = await _scan(state, query.model_id)
    stop = None if query.limit is None else query.offset + query.limit
    return CheckpointList([_info(state, one) for one in found[query.offset : stop]], len(found))


async def set_ttl(state: State, query: SetCheckpointTtl) -> Ok | Rejected:
    """Set when a checkpoint expires."""
    found = state.find_checkpoint(query.checkpoint)
    if found is None:
        return _missing(query.checkpoint)
    record = _record(state, found)
    record.expires = None if query.ttl_s is None else time.time() + query.ttl_s
    state.registry.checkpoints[record.key] = record
    await state.journal.put([stored(record)])
    return Ok()


async def weights_info(state: State, query: GetWeightsInfo) -> WeightsInfo | Rejected:
    """Properties of the model in a checkpoint."""
    found = state.find_checkpoint(query.checkpoint)
    if found is None:
        return _missing(query.checkpoint)
    record = _record(state, found)
    return WeightsInfo(record.base_model, record.lora, found.size_bytes, record.num_steps)


async def list_training_runs(state: State, query: ListTrainingRuns) -> TrainingRuns:
    """Models that exist or have checkpoints, most recently active first."""
    runs = await _runs(state)
    return TrainingRuns(runs[query.offset : query.offset + query.limit], len(runs))


async def get_training_run(state: State, query: GetTrainingRun) -> TrainingRun | Rejected:
    """One training run."""
    runs = await _runs(state, query.model_id)
    return runs[0] if runs else Rejected(404, f"there is no training run {query.model_id}")


async def _runs(state: State, model_id: str | None = None) -> list[TrainingRun]:
    newest: dict[str, dict[str, CheckpointFolder]] = {}
    for found in await _scan(state, model_id):
        newest.setdefault(found.checkpoint.model_id, {}).setdefault(found.checkpoint.kind, found)
    created = {name for name, model in state.registry.models.items() if model.state not in ("creating", "failed")}
    names = {*newest, *created}
    runs = [_run(state, name, newest.get(name, {})) for name in names if model_id in (None, name)]
    return sorted(runs, key=lambda run: run.last_active, reverse=True)


def _run(state: State, model_id: str, newest: dict[str, CheckpointFolder]) -> TrainingRun:
    model = state.registry.models.get(model_id)
    trained, sampled = newest.get("weights"), newest.get("sampler_weights")
    last_saved = max((one.created for one in newest.values()), default=0.0)
    records = [_record(state, one) for one in newest.values()]
    lora = model.lora if model is not None else next((r.lora for r in records if r.lora is not None), None)
    return TrainingRun(
        model_id,
        state.options.model_name if model is not None else next(r.base_model for r in records),
        lora.rank if lora is not None else None,
        max(model.last_active, last_saved) if model is not None else last_saved,
        None if trained is None else _info(state, trained),
        None if sampled is None else _info(state, sampled),
        {} if model is None else model.create.user_metadata,
    )


async def _scan(state: State, model_id: str | None) -> list[CheckpointFolder]:
    found = await asyncio.to_thread(catalogue.scan, state.options.folder, model_id)
    return [
        one
        for one in found
        if not one.checkpoint.name.startswith(RESERVED_PREFIXES) and not state.is_unavailable(one.checkpoint)
    ]


def _info(state: State, found: CheckpointFolder) -> CheckpointInfo:
    record = _record(state, found)
    return CheckpointInfo(found.checkpoint, found.created, found.size_bytes, record.user_metadata, record.expires)


async def adopt(state: State) -> None:
    """Add records for checkpoints in the output folder that are missing in the journal, for example in a new one.

    The records come from the checkpoints' manifests. Exports have no manifest and are skipped. Weights that were saved
    without a name are deleted, since no sampling session uses them, unless their save has not ended.
    """
    folder, known = state.options.folder, state.registry.checkpoints
    for ref in await asyncio.to_thread(catalogue.list_refs, folder):
        if is_unnamed(ref) and checkpoint_key(ref) not in known:
            if ref.name.removeprefix(UNNAMED_PREFIX) not in state.open:
                await asyncio.to_thread(catalogue.delete, folder, ref)
            continue
        is_own = ref.name.startswith(RESERVED_PREFIXES)
        if ref.kind != "external_weights" and not is_own and checkpoint_key(ref) not in known:
            found = await asyncio.to_thread(catalogue.find, folder, ref)
            record = None if found is None else await asyncio.to_thread(_record_from_manifest, state, found)
            if record is not None:
                known[record.key] = record
                logger.info("event=adopted checkpoint=%s", ref.uri("xorl"))
                await state.journal.put([stored(record)])


def _record_from_manifest(state: State, found: CheckpointFolder) -> CheckpointRecord | None:
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


def _record(state: State, found: CheckpointFolder) -> CheckpointRecord:
    """The record of a checkpoint; inferred from its model if the checkpoint was added while the service ran."""
    record = state.registry.checkpoints.get(checkpoint_key(found.checkpoint))
    if record is not None:
        return record
    model = state.registry.models.get(found.checkpoint.model_id)
    lora = None if model is None else model.lora
    return CheckpointRecord(found.checkpoint, found.created, state.options.model_name, lora, 0)


def _missing(checkpoint: CheckpointRef) -> Rejected:
    return Rejected(404, f"there is no checkpoint {checkpoint.uri('xorl')}")
