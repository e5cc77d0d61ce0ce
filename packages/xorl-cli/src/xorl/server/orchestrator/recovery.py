"""Restores a model that the workers do not hold: loads its boundary, then replays the requests that changed it since.

There are four cases: the workers died, the workers dropped the model after an operation failed half way, the service
was restarted, or the model was evicted while its client was idle. A model is only restored when a request needs it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from xorl.server.identifiers import CheckpointRef
from xorl.server.messages import Operation, Result, Resume, Suspended, Work
from xorl.server.operations import CreateModel, Failure, LoadWeights, ModelCreated, UnloadModel
from xorl.server.orchestrator.checkpoint_reads import CheckpointReads
from xorl.server.orchestrator.commit import Damaged
from xorl.server.orchestrator.journal import Journal
from xorl.server.orchestrator.operation_properties import decode_operation
from xorl.server.orchestrator.registry import ModelRecord, stored
from xorl.server.orchestrator.workers import Incarnation

logger = logging.getLogger(__name__)


class RecoveryError(Exception):
    """A model cannot be restored; the message has the reason and the remedy."""


async def restore(model: ModelRecord, journal: Journal, reads: CheckpointReads, workers: Incarnation) -> int:
    """Restore a model to its state after the last request that ended. Returns the number of replayed requests.

    Raises RecoveryError, or WorkersLost if the workers die meanwhile. A partly restored model is harmless: the next
    attempt begins by unloading it, and the record names the workers only once the model is complete.
    """
    started = time.monotonic()
    # The result is ignored, since there may be no model to unload.
    await _run(workers, UnloadModel(model.model_id))
    async with reads.reading(lambda: model.restore_checkpoint):
        created = await _run(workers, _creation(model))
    if not isinstance(created, ModelCreated):
        raise RecoveryError(_advice(model, created))
    numbers = _after_boundary(model, created, journal)
    for number in numbers:
        try:
            operation = decode_operation(journal.tail_operation(number))
        except Damaged as problem:
            await _run(workers, UnloadModel(model.model_id))
            raise RecoveryError(
                _advice(model, Failure("server", 500, f"the journal is damaged: {problem}"))
            ) from problem
        if isinstance(operation, LoadWeights):
            async with reads.reading(partial(_loaded, model, number)):
                operation = replace(operation, checkpoint=_loaded(model, number) or operation.checkpoint)
                result = await _run(workers, operation)
        else:
            result = await _run(workers, operation)
        if isinstance(result, Failure):
            await _run(workers, UnloadModel(model.model_id))
            raise RecoveryError(_advice(model, result))
    model.workers = workers.name
    model.state = "ready"
    await journal.put([stored(model)])
    seconds = time.monotonic() - started
    logger.info("event=restored model=%s num_requests=%d seconds=%.2f", model.model_id, len(numbers), seconds)
    return len(numbers)


def _creation(model: ModelRecord) -> CreateModel:
    if model.boundary is None:
        if model.lora is None or model.create.lora is None:
            # Full weights, or the adapter of a checkpoint, which contains its own settings.
            return model.create
        # The settings it was created with, since the service's defaults may have changed.
        return replace(model.create, lora=model.lora)
    return replace(model.create, checkpoint=model.boundary, lora=None, with_optimizer=True)


def _loaded(model: ModelRecord, number: int) -> CheckpointRef | None:
    """The checkpoint that a request of the tail loads, by its current name."""
    return model.loads.get(number)


def _after_boundary(model: ModelRecord, created: ModelCreated, journal: Journal) -> Sequence[int]:
    """The requests of the tail that the boundary does not hold.

    If a newer save was overwriting the boundary, it may or may not have finished; the number of steps in the loaded
    checkpoint tells.
    """
    numbers = journal.tail(model.lane)
    if not model.is_overwriting or created.num_steps == model.boundary_steps:
        return numbers
    return numbers[journal.num_settled(model.lane) :]


async def _run(workers: Incarnation, operation: Operation) -> Result:
    # A new id, since the workers answer a known id with the remembered result.
    name = f"again-{secrets.token_hex(8)}"
    while True:
        (result,) = (await workers.run(Work([name], [operation], may_suspend=True))).results
        if not isinstance(result, Suspended):
            return result
        # Work that was waiting has run first.
        operation = Resume()


def _advice(model: ModelRecord, result: Result) -> str:
    reason = result.message if isinstance(result, Failure) else f"the workers answered {type(result).__name__}"
    source = "its creation" if model.boundary is None else model.boundary.uri("xorl")
    return (
        f"model {model.model_id} was no longer on the workers and could not be restored from {source}: {reason}. "
        "Create a model from one of its checkpoints and continue from there"
    )
