"""The records of sessions, models, samplers and checkpoints: in memory to be asked, in the journal to survive."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from xorl.server.identifiers import CheckpointKind, CheckpointRef
from xorl.server.operations import CreateModel, LoraSpec
from xorl.server.orchestrator.journal import Journal, Record, decoded


class SessionRecord(msgspec.Struct):
    """A client's session. Times are seconds since 1970."""

    session_id: str
    created: float
    last_active: float
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, str] = msgspec.field(default_factory=dict)
    display_name: str | None = None
    is_finished: bool = False


class ModelRecord(msgspec.Struct):
    """A model: what it is, where its state is, and from what it can be made again.

    Attributes:
        generation: how often a model of this id was created.
        create: the operation that made it, with its seed chosen.
        state: creating until the workers have made it, then ready; released after it was saved and taken off the
            workers, from where it comes back when it is called; unloaded or failed if it does not exist any more.
        workers: the incarnation of the workers that holds it, or None.
        weights_id: changes whenever its weights change.
        replaces: whether the workers may still hold the model of this id before it.
        boundary: the checkpoint from which the journal's tail makes the model again; None for its creation.
        boundary_steps: the optimizer steps in the boundary.
        is_overwriting: whether a newer state is being saved over the boundary.
        loads: the checkpoints that the tail loads.
        num_steps: optimizer steps so far.
        tail_s, save_s: how long the workers took for the tail, and for the last save.
        checkpoint_bytes: the size of the last checkpoint, by kind; until there is one, what the workers expect.
    """

    model_id: str
    session_id: str | None
    generation: int
    create: CreateModel
    created: float
    last_active: float
    state: str = "creating"
    workers: str | None = None
    boundary: CheckpointRef | None = None
    boundary_steps: int = 0
    is_overwriting: bool = False
    replaces: bool = False
    num_steps: int = 0
    next_seq: int = 1
    lora: LoraSpec | None = None
    tail_s: float = 0.0
    tail_bytes: int = 0
    save_s: float = 0.0
    loads: list[CheckpointRef] = msgspec.field(default_factory=list)
    num_recoveries: int = 0
    weights_id: str = ""
    checkpoint_bytes: dict[CheckpointKind, int] = msgspec.field(default_factory=dict)

    @property
    def lane(self) -> str:
        """Its lane in the scheduler."""
        return f"{self.model_id}#{self.generation}"

    @property
    def client(self) -> str:
        """Among whom the workers are shared."""
        return self.session_id or self.model_id

    @property
    def is_there(self) -> bool:
        """Whether it takes requests."""
        return self.state in ("creating", "ready", "released")

    @property
    def origin(self) -> CheckpointRef | None:
        """The checkpoint from which it is made again, before its tail."""
        return self.create.checkpoint if self.boundary is None else self.boundary


class SamplerRecord(msgspec.Struct):
    """A sampling session: of the base, of a checkpoint, or of a model's weights in the workers' memory (`snapshot_of`).

    workers: the incarnation in whose memory they are, None once it has dropped them.
    version: that of the weights, as endpoints are told it.
    """

    sampling_session_id: str
    session_id: str | None
    base_model: str
    created: float
    checkpoint: CheckpointRef | None = None
    snapshot_of: str | None = None
    workers: str | None = None
    name: str | None = None
    version: str | None = None


class CheckpointRecord(msgspec.Struct):
    """What a checkpoint's files do not say by themselves; expires: when to delete it; version: as of SamplerRecord.

    is_initial: the service made it when the model was created, and the client's first save of that name replaces it.
    """

    checkpoint: CheckpointRef
    created: float
    base_model: str
    lora: LoraSpec | None
    num_steps: int
    user_metadata: dict[str, str] = msgspec.field(default_factory=dict)
    expires: float | None = None
    version: str | None = None
    is_initial: bool = False

    @property
    def key(self) -> str:
        return checkpoint_key(self.checkpoint)

    def is_over(self, now: float) -> bool:
        """Whether its time is, `now`, seconds since 1970: its files may still be there, and nobody is to see them."""
        return self.expires is not None and self.expires <= now


AnyRecord = SessionRecord | ModelRecord | SamplerRecord | CheckpointRecord
Kept = TypeVar("Kept", SessionRecord, ModelRecord, SamplerRecord, CheckpointRecord)
_KINDS: dict[type, str] = {
    SessionRecord: "session",
    ModelRecord: "model",
    SamplerRecord: "sampler",
    CheckpointRecord: "checkpoint",
}


class Registry:
    """All records, read from the journal once. Who changes one must write `stored(record)` in the same transaction."""

    def __init__(self, journal: Journal) -> None:
        self.sessions = _read(journal, SessionRecord)
        self.models = _read(journal, ModelRecord)
        self.samplers = _read(journal, SamplerRecord)
        self.checkpoints = _read(journal, CheckpointRecord)

    def activity(self, model: ModelRecord) -> float:
        """When a model's client was last heard of."""
        session = self.sessions.get(model.session_id or "")
        return max(model.last_active, session.last_active if session is not None else 0.0)

    def has_left(self, model: ModelRecord) -> bool:
        """Whether a model's client has ended its session, and has not called since."""
        session = self.sessions.get(model.session_id or "")
        return session is not None and session.is_finished and session.last_active >= model.last_active

    def readers(self, checkpoint: CheckpointRef) -> list[ModelRecord]:
        """The models whose boundary, creation or tail reads a checkpoint: without it, they would be lost."""
        there = [model for model in self.models.values() if model.is_there]
        return [model for model in there if checkpoint in (model.origin, *model.loads)]

    def drop_snapshots(self, model_id: str) -> list[Record]:
        """Note that workers took a model off, with what samplers had of it in memory; the records are to be written."""
        lost = [one for one in self.samplers.values() if one.snapshot_of == model_id and one.workers is not None]
        for sampler in lost:
            sampler.workers = None
        return [stored(sampler) for sampler in lost]

    def models_of(self, session_id: str) -> list[ModelRecord]:
        """The models of a session, in the order of their creation."""
        found = [model for model in self.models.values() if model.session_id == session_id]
        return sorted(found, key=lambda model: model.created)


def checkpoint_key(checkpoint: CheckpointRef) -> str:
    """The name of a checkpoint's record."""
    return f"{checkpoint.model_id}/{checkpoint.kind}/{checkpoint.name}"


def stored(record: AnyRecord) -> Record:
    """The record as the journal keeps it."""
    return Record(_KINDS[type(record)], _name(record), msgspec.msgpack.encode(record))


def dropped(record: AnyRecord) -> Record:
    """The journal's record to be removed."""
    return Record(_KINDS[type(record)], _name(record), None)


def _name(record: AnyRecord) -> str:
    match record:
        case SessionRecord():
            return record.session_id
        case ModelRecord():
            return record.model_id
        case SamplerRecord():
            return record.sampling_session_id
        case CheckpointRecord():
            return record.key


def _read(journal: Journal, kind: type[Kept]) -> dict[str, Kept]:
    decode = msgspec.msgpack.Decoder(kind).decode
    records = journal.records(_KINDS[kind])
    return {name: decoded(decode, body, f"the record of {_KINDS[kind]} {name!r}") for name, body in records}
