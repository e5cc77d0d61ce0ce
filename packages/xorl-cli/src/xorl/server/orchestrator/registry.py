"""Records of sessions, models, samplers and checkpoints: held in memory, persisted in the journal."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec.structs import replace

from xorl.server.identifiers import CheckpointKind, CheckpointRef
from xorl.server.operations import CreateModel, LoraSpec
from xorl.server.orchestrator.journal import Journal, Record, decoded

# Clients with a session send a heartbeat every ten seconds, and warn their user after this long without an answer.
SESSION_SILENCE_S = 120.0
# A client without heartbeats may be busy with its last result.
SESSIONLESS_SILENCE_S = 600.0


class SessionRecord(msgspec.Struct):
    """A client's session. Times are seconds since 1970."""

    session_id: str
    created: float
    last_active: float
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, str] = msgspec.field(default_factory=dict)
    display_name: str | None = None
    is_finished: bool = False
    finish_reason: str = "success"


class ModelRecord(msgspec.Struct):
    """A model: its properties, where its state is, and how to restore it.

    The journal's tail holds the requests that changed the model since its boundary; replaying them on the boundary
    restores the model.

    Attributes:
        generation: how many models of this id have been created, including this one.
        create: the operation that created it, with its seed filled in.
        state: creating until the workers have created it, then ready; released after it was saved and evicted from the
            workers, until its next request restores it; unloaded or failed if it no longer exists.
        workers: the incarnation of the workers that holds it, or None.
        weights_id: changes whenever its weights change.
        replaces: whether the workers may still hold the previous model of this id.
        boundary: the checkpoint to which the tail applies; None if the tail applies to the newly created model.
        boundary_steps: the optimizer steps in the boundary.
        is_overwriting: whether a newer state is being saved over the boundary.
        loads: the checkpoints that the tail loads, by the number of the request in the journal.
        num_steps: optimizer steps so far.
        tail_s, save_s: how long the workers took for the tail, and for the last save.
        checkpoint_bytes: the size of the last checkpoint, by kind; before the first one, the workers' estimate.
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
    loads: dict[int, CheckpointRef] = msgspec.field(default_factory=dict)
    num_recoveries: int = 0
    weights_id: str = ""
    checkpoint_bytes: dict[CheckpointKind, int] = msgspec.field(default_factory=dict)

    @property
    def lane(self) -> str:
        """Its lane in the scheduler; see `model_of_lane`."""
        return f"{self.model_id}#{self.generation}"

    @property
    def client(self) -> str:
        """The client under which the scheduler accounts for its requests."""
        return self.session_id or self.model_id

    @property
    def exists(self) -> bool:
        """Whether it accepts requests."""
        return self.state in ("creating", "ready", "released")

    @property
    def restore_checkpoint(self) -> CheckpointRef | None:
        """The checkpoint that is loaded to restore it, before its tail is replayed."""
        return self.create.checkpoint if self.boundary is None else self.boundary

    def redirect(self, old: CheckpointRef, new: CheckpointRef) -> None:
        """Use `new` wherever the model would have been restored from `old`, which was renamed."""
        if self.boundary == old:
            self.boundary = new
        if self.create.checkpoint == old:
            self.create = replace(self.create, checkpoint=new)
        self.loads = {number: new if checkpoint == old else checkpoint for number, checkpoint in self.loads.items()}


class SamplerRecord(msgspec.Struct):
    """A sampling session: of the base, or of a checkpoint."""

    sampling_session_id: str
    session_id: str | None
    base_model: str
    created: float
    checkpoint: CheckpointRef | None = None
    name: str | None = None


class CheckpointRecord(msgspec.Struct):
    """A checkpoint's metadata. expires: when to delete it. version: of the weights, as sent to endpoints.

    is_initial: the service saved it when the model was created; the client's first save of that name replaces it.
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

    def has_expired(self, now: float) -> bool:
        """Whether it has expired at `now` (seconds since 1970); it is hidden even if its files still exist."""
        return self.expires is not None and self.expires <= now


class KeptRecord(msgspec.Struct):
    """A checkpoint deleted while models needed it: kept under the hidden name `kept` until no model needs it."""

    kept: CheckpointRef
    original: CheckpointRef

    @property
    def key(self) -> str:
        return checkpoint_key(self.kept)


AnyRecord = SessionRecord | ModelRecord | SamplerRecord | CheckpointRecord | KeptRecord
RecordT = TypeVar("RecordT", SessionRecord, ModelRecord, SamplerRecord, CheckpointRecord, KeptRecord)
_KINDS: dict[type, str] = {
    SessionRecord: "session",
    ModelRecord: "model",
    SamplerRecord: "sampler",
    CheckpointRecord: "checkpoint",
    KeptRecord: "kept",
}


class Registry:
    """All records, loaded once from the journal. After changing a record, write `stored(record)` to the journal."""

    def __init__(self, journal: Journal) -> None:
        self.sessions = _load(journal, SessionRecord)
        self.models = _load(journal, ModelRecord)
        self.samplers = _load(journal, SamplerRecord)
        self.checkpoints = _load(journal, CheckpointRecord)
        self.kept = _load(journal, KeptRecord)

    def last_activity(self, model: ModelRecord) -> float:
        """When a model's client was last active."""
        session = self.sessions.get(model.session_id or "")
        return max(model.last_active, session.last_active if session is not None else 0.0)

    def is_finished(self, model: ModelRecord) -> bool:
        """Whether a model's client has finished its session. The client may have used the model since."""
        session = self.sessions.get(model.session_id or "")
        return session is not None and session.is_finished

    def client_has_left(self, model: ModelRecord) -> bool:
        """Whether a model's client has ended its session and has not used the model since."""
        session = self.sessions.get(model.session_id or "")
        return session is not None and session.is_finished and session.last_active >= model.last_active

    def has_expired(self, checkpoint: CheckpointRef, now: float) -> bool:
        """Whether a checkpoint has expired according to its record, if it has one."""
        record = self.checkpoints.get(checkpoint_key(checkpoint))
        return record is not None and record.has_expired(now)

    def dependents(self, checkpoint: CheckpointRef) -> list[ModelRecord]:
        """The models that need a checkpoint to be restored, for their boundary, their creation or their tail."""
        existing = [model for model in self.models.values() if model.exists]
        return [model for model in existing if checkpoint in (model.restore_checkpoint, *model.loads.values())]

    def models_of(self, session_id: str) -> list[ModelRecord]:
        """The models of a session, in order of creation."""
        found = [model for model in self.models.values() if model.session_id == session_id]
        return sorted(found, key=lambda model: model.created)


def model_of_lane(lane: str) -> str:
    """The id of the model that a lane is of."""
    return lane.rpartition("#")[0]


def checkpoint_key(checkpoint: CheckpointRef) -> str:
    """The name of a checkpoint's record."""
    return f"{checkpoint.model_id}/{checkpoint.kind}/{checkpoint.name}"


def stored(record: AnyRecord) -> Record:
    """The journal record that stores this record."""
    return Record(_KINDS[type(record)], _name(record), msgspec.msgpack.encode(record))


def deleted(record: AnyRecord) -> Record:
    """The journal record that deletes this record."""
    return Record(_KINDS[type(record)], _name(record), None)


def _name(record: AnyRecord) -> str:
    match record:
        case SessionRecord():
            return record.session_id
        case ModelRecord():
            return record.model_id
        case SamplerRecord():
            return record.sampling_session_id
        case CheckpointRecord() | KeptRecord():
            return record.key


def _load(journal: Journal, kind: type[RecordT]) -> dict[str, RecordT]:
    decode = msgspec.msgpack.Decoder(kind).decode
    records = journal.records(_KINDS[kind])
    return {name: decoded(decode, body, f"the record of {_KINDS[kind]} {name!r}") for name, body in records}
