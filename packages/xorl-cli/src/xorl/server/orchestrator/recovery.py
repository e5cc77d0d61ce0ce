"""Makes a model again that the workers do not hold: from its boundary, then by replaying what changed it since.

This serves four cases: the workers died, they gave the model up since an operation failed that had begun to change it,
the whole service was started again, or the model was released while its client was idle. A model is only made again
when a request needs it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence

from msgspec.structs import replace

from xorl.server.messages import Operation, Result, Work
from xorl.server.operations import CreateModel, Failure, ModelCreated, UnloadModel
from xorl.server.orchestrator.calls import decode_operation
from xorl.server.orchestrator.commit import Damaged
from xorl.server.orchestrator.journal import Journal
from xorl.server.orchestrator.registry import ModelRecord, stored
from xorl.server.orchestrator.workers import Incarnation

logger = logging.getLogger(__name__)


class RecoveryError(Exception):
    """A model cannot be made again; the message says why and what its client can do."""


async def restore(model: ModelRecord, journal: Journal, workers: Incarnation) -> int:
    """Make the model as it was after the last request that ended. Returns how many requests were run again.

    Raises RecoveryError, or WorkersLost if the workers die again. A model that is half made does no harm then: the next
    attempt begins by unloading it, and only at the end does the record say that the workers hold the model.
    """
    started = time.monotonic()
    # Its answer does not matter: there may be none to unload.
    await _run(workers, UnloadModel(model.model_id))
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
            # Full weights, or the adapter of a checkpoint, which says by itself what it is.
            return model.create
        # As it was made: what the service does where a client says nothing may be another since.
        return replace(model.create, lora=model.lora)
    return replace(model.create, checkpoint=model.boundary, lora=None, with_optimizer=True)


def _after_boundary(model: ModelRecord, created: ModelCreated, journal: Journal) -> Sequence[int]:
    """The requests of the tail that the boundary does not hold.

    If the boundary was just being overwritten by a newer save, which may have finished or not, its number of steps
    tells which of the two it is.
    """
    numbers = journal.tail(model.lane)
    if not model.is_overwriting or created.num_steps == model.boundary_steps:
        return numbers
    return numbers[journal.num_settled(model.lane) :]


async def _run(workers: Incarnation, operation: Operation) -> Result:
    # A new name: the workers would answer an old one with what they remember, and do nothing.
    done = await workers.run(Work([f"again-{secrets.token_hex(8)}"], [operation]))
    return done.results[0]


def _advice(model: ModelRecord, result: Result) -> str:
    why = result.message if isinstance(result, Failure) else f"the workers answered {type(result).__name__}"
    where = "its creation" if model.boundary is None else model.boundary.uri("xorl")
    return (
        f"model {model.model_id} was not on the workers any more and could not be made again from {where}: {why}. "
        "Create a model from one of its checkpoints and go on from there"
    )
