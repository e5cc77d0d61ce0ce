"""Queries that the orchestrator answers at once, and their answers: sessions, models, checkpoints.

Queries about inference endpoints are in `endpoint_queries`, and those about the status in `status_queries`. The unions
Request and Answer below contain all of them.

A query that cannot be answered gets Rejected. Times are in seconds since 1970.
"""

from __future__ import annotations

import msgspec

from xorl.server.endpoint_queries import (
    AddEndpoint,
    ConnectEndpoints,
    DisconnectEndpoints,
    Endpoints,
    EndpointState,
    ListEndpoints,
    RemoveEndpoint,
    SetSyncQuantization,
)
from xorl.server.identifiers import CheckpointRef
from xorl.server.messages import (
    Accepted,
    Cancel,
    CancelOutcome,
    Finished,
    Ok,
    Pending,
    Poll,
    Rejected,
    Submit,
    Tombstone,
    Unknown,
    Unreadable,
)
from xorl.server.operations import BaseSampler, CheckpointSampler, LoraSpec, Message
from xorl.server.status_queries import GetStatus, GetStorage, Status, Storage


class GetService(Message, frozen=True):
    """Ask which model is served; answered by ServiceInfo."""


class ServiceInfo(Message, frozen=True):
    """The base model and how it is trained. tokenizer: a name or folder. ready: the workers accept work.

    base_names: all names of the base that clients may send, `model_name` first.
    max_context_length: None until the workers have reported it.
    """

    model_name: str
    base_names: tuple[str, ...]
    tokenizer: str
    arch: str
    max_context_length: int | None
    enable_lora: bool
    lora_rank: int | None
    lora_alpha: float | None
    vocab_size: int
    output_dir: str
    ready: bool


class CreateSession(Message, frozen=True):
    """Begin a session, with the client's id if it gives one; answered by SessionCreated."""

    session_id: str | None = None
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, str] = msgspec.field(default_factory=dict)
    display_name: str | None = None


class SessionCreated(Message, frozen=True):
    """Answer to CreateSession. The client shows info_message to the user."""

    session_id: str
    info_message: str | None = None


class Heartbeat(Message, frozen=True):
    """Keep a session, or a model without one, active; answered by Ok, or Rejected(410) if it has ended."""

    session_id: str


class FinishSession(Message, frozen=True):
    """End a session: its models are saved and released like idle ones. Answered by Ok."""

    session_id: str
    reason: str


class GetSession(Message, frozen=True):
    """Ask for a session; answered by SessionInfo."""

    session_id: str


class ListSessions(Message, frozen=True):
    """Ask for all sessions; answered by Sessions."""

    limit: int = 20
    offset: int = 0


class SessionInfo(Message, frozen=True):
    """A session with its models and samplers."""

    session_id: str
    created: float
    last_active: float
    model_ids: list[str]
    sampler_ids: list[str]
    tags: tuple[str, ...]
    user_metadata: dict[str, str]
    display_name: str | None
    is_finished: bool


class Sessions(Message, frozen=True):
    """Answer to ListSessions, newest first."""

    sessions: list[SessionInfo]
    total: int


class GetModel(Message, frozen=True):
    """Ask for a model; answered by ModelInfo, or Rejected(404) if it does not exist."""

    model_id: str


class SearchSessions(Message, frozen=True):
    """Ask for the sessions that match, newest first; answered by FoundSessions. None and {} match all.

    session_id, display_name: a session that matches either one matches; every word must be in the name, in any case.
    statuses: as in FoundSession. before: creation and id of the last session of the page before.
    """

    limit: int
    session_id: str | None = None
    display_name: str | None = None
    user_metadata: dict[str, str] = msgspec.field(default_factory=dict)
    statuses: tuple[str, ...] | None = None
    before: tuple[float, str] | None = None


class FoundSession(Message, frozen=True):
    """A session that was found. status: active, its client's reason to finish it, or None without a client."""

    session_id: str
    created: float
    status: str | None
    num_checkpoints: int
    display_name: str | None
    user_metadata: dict[str, str]


class FoundSessions(Message, frozen=True):
    """Answer to SearchSessions: one page. has_more: whether more sessions match."""

    sessions: list[FoundSession]
    has_more: bool


class ModelInfo(Message, frozen=True):
    """A model. lora: None for full weights. tokenizer_name: the base's name, by which clients load the tokenizer."""

    model_id: str
    base_model: str
    arch: str
    tokenizer: str
    tokenizer_name: str
    lora: LoraSpec | None
    step: int
    user_metadata: dict[str, str]


class CreateSamplingSession(Message, frozen=True):
    """Begin sampling from a checkpoint, or from the base if it is None; answered by SamplingSession.

    sampling_session_id: the idempotency key, which the API builds from the client's session and sequence number; None
    for a client without sessions, which samples by name.
    """

    sampling_session_id: str | None
    session_id: str | None
    base_model: str | None
    checkpoint: CheckpointRef | None


class GetSampler(Message, frozen=True):
    """Ask for a sampling session; answered by SamplingSession."""

    sampling_session_id: str


class SamplingSession(Message, frozen=True):
    """A sampling session and its weights. name: the name by which NamedSampler finds it."""

    sampling_session_id: str
    base_model: str
    checkpoint: CheckpointRef | None
    name: str | None


class ListServedModels(Message, frozen=True):
    """Ask for the models that can be sampled from by name; answered by ServedModels."""


class FindServedModel(Message, frozen=True):
    """Ask which weights a name currently stands for; answered by ServedModel.

    saves: the weights will be sampled from; a model's current weights are saved first, if they are not saved already.
    """

    name: str
    saves: bool = False


class ServedModel(Message, frozen=True):
    """A model that can be sampled from by name. created: when its weights were saved.

    sampler: None if its weights are not saved yet, and the query did not ask to save them.
    """

    name: str
    created: float
    sampler: BaseSampler | CheckpointSampler | None


class ServedModels(Message, frozen=True):
    """Answer to ListServedModels: the base first, then the newest first."""

    models: list[ServedModel]


class ListCheckpoints(Message, frozen=True):
    """Ask for the checkpoints of one model, or of all; answered by CheckpointList. limit: None returns all."""

    model_id: str | None = None
    limit: int | None = None
    offset: int = 0


class CheckpointInfo(Message, frozen=True):
    """An existing checkpoint."""

    checkpoint: CheckpointRef
    created: float
    size_bytes: int
    user_metadata: dict[str, str]
    expires: float | None = None


class CheckpointList(Message, frozen=True):
    """Answer to ListCheckpoints, newest first."""

    checkpoints: list[CheckpointInfo]
    total: int


class DeleteCheckpoint(Message, frozen=True):
    """Delete a checkpoint; answered by Ok, or Rejected(404)."""

    checkpoint: CheckpointRef


class SetCheckpointTtl(Message, frozen=True):
    """Delete a checkpoint ttl_s from now, or never if None; answered by Ok, or Rejected(404)."""

    checkpoint: CheckpointRef
    ttl_s: float | None


class GetWeightsInfo(Message, frozen=True):
    """Ask which model a checkpoint holds; answered by WeightsInfo."""

    checkpoint: CheckpointRef


class WeightsInfo(Message, frozen=True):
    """The model that a checkpoint holds. lora: None for full weights."""

    base_model: str
    lora: LoraSpec | None
    size_bytes: int
    step: int


class ListTrainingRuns(Message, frozen=True):
    """Ask for all models that exist or have checkpoints; answered by TrainingRuns."""

    limit: int = 20
    offset: int = 0


class GetTrainingRun(Message, frozen=True):
    """Ask for one training run; answered by TrainingRun."""

    model_id: str


class TrainingRun(Message, frozen=True):
    """A model and its newest checkpoints."""

    model_id: str
    base_model: str
    lora_rank: int | None
    last_active: float
    last_checkpoint: CheckpointInfo | None
    last_sampler_checkpoint: CheckpointInfo | None
    user_metadata: dict[str, str]


class TrainingRuns(Message, frozen=True):
    """Answer to ListTrainingRuns, most recently active first."""

    runs: list[TrainingRun]
    total: int


Request = (
    Submit
    | Tombstone
    | Unreadable
    | Poll
    | Cancel
    | GetService
    | GetStatus
    | GetStorage
    | CreateSession
    | Heartbeat
    | FinishSession
    | GetSession
    | ListSessions
    | SearchSessions
    | GetModel
    | CreateSamplingSession
    | GetSampler
    | ListServedModels
    | FindServedModel
    | ListCheckpoints
    | DeleteCheckpoint
    | SetCheckpointTtl
    | GetWeightsInfo
    | ListTrainingRuns
    | GetTrainingRun
    | AddEndpoint
    | RemoveEndpoint
    | ListEndpoints
    | ConnectEndpoints
    | DisconnectEndpoints
    | SetSyncQuantization
)
"""API -> orchestrator."""

Answer = (
    Accepted
    | Rejected
    | Pending
    | Finished
    | Unknown
    | CancelOutcome
    | Ok
    | ServiceInfo
    | Status
    | Storage
    | SessionCreated
    | SessionInfo
    | Sessions
    | FoundSessions
    | ModelInfo
    | SamplingSession
    | ServedModel
    | ServedModels
    | CheckpointInfo
    | CheckpointList
    | WeightsInfo
    | TrainingRun
    | TrainingRuns
    | EndpointState
    | Endpoints
)
"""Orchestrator -> API."""
