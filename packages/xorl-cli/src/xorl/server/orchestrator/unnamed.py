"""Retention of weights that clients save for sampling without a name, as reinforcement learning does at every step.

They are ordinary sampler checkpoints under reserved names, hidden from clients, with an expiry that each use postpones.
`deletion.delete_expired` deletes them.
"""

from __future__ import annotations

from collections.abc import Iterator

from xorl.server.identifiers import CheckpointRef
from xorl.server.orchestrator.journal import Record
from xorl.server.orchestrator.operation_properties import INITIAL_NAME, UNNAMED_PREFIX
from xorl.server.orchestrator.registry import CheckpointRecord, Registry, checkpoint_key, stored

# Deleted when they have not been used for this long, in seconds.
KEPT_S = 24 * 3600.0
# The most that a model keeps, by last use. Asynchronous loops sample from weights a few steps old.
NUM_ADAPTERS = 64
NUM_WHOLE_MODELS = 4


def is_unnamed(checkpoint: CheckpointRef) -> bool:
    """Whether a checkpoint holds weights that a client saved for sampling without a name."""
    return checkpoint.kind == "sampler_weights" and checkpoint.name.startswith(UNNAMED_PREFIX)


def unnamed_of(registry: Registry, model_id: str | None = None) -> Iterator[CheckpointRecord]:
    """The records of all unnamed weights, or of those of one model."""
    for record in registry.checkpoints.values():
        if is_unnamed(record.checkpoint) and model_id in (None, record.checkpoint.model_id):
            yield record


def note_use(registry: Registry, checkpoint: CheckpointRef, now: float) -> None:
    """Postpone the expiry of unnamed weights that are sampled from; does nothing for other checkpoints."""
    record = registry.checkpoints.get(checkpoint_key(checkpoint))
    if record is not None and is_unnamed(checkpoint) and not record.has_expired(now):
        record.expires = now + KEPT_S


def expire_with_model(registry: Registry, model_id: str, now: float, initial_at: float | None = None) -> list[Record]:
    """Expire a model's weights that no client named, when the model ends; returns the records to write.

    These are its unnamed weights and, at `initial_at` (by default now), the initial checkpoint that the service saved,
    unless its client has set an expiry for it.
    """
    records = expire_excess(registry, model_id, now, num_kept=0)
    initial = registry.checkpoints.get(checkpoint_key(CheckpointRef(model_id, "weights", INITIAL_NAME)))
    if initial is not None and initial.is_initial and initial.expires is None:
        initial.expires = now if initial_at is None else initial_at
        records.append(stored(initial))
    return records


def expire_excess(registry: Registry, model_id: str, now: float, *, num_kept: int) -> list[Record]:
    """Expire a model's unnamed weights except the `num_kept` last used; returns the records to write.

    Each use sets the expiry to the same time later, so the order of expiry is that of use.
    """
    found = sorted(unnamed_of(registry, model_id), key=lambda record: record.expires or now, reverse=True)
    expired = [record for record in found[num_kept:] if not record.has_expired(now)]
    for record in expired:
        record.expires = now
    return [stored(record) for record in expired]
