"""What the API asks the orchestrator directly, and the answers: sessions, models, checkpoints, endpoints, status.

A query that cannot be answered gets Rejected. Times are seconds since 1970.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from xorl.server.identifiers import CheckpointRef
from xorl.server.messages import Accepted, Cancel, Finished, Ok, Pending, Poll, Rejected, Submit, Tombstone, Unknown
from xorl.server.operations import BlockFp8, Endpoint, LoraSpec, Message


class GetService(Message, frozen=True):
    """What is served; answered by ServiceInfo."""


class ServiceInfo(Message, frozen=True):
    """The base model and how it is trained. tokenizer: a name or folder. ready: workers take work.

    max_context_length: None until workers were ready, who know it.
    """

    model_name: str
    tokenizer: str
    arch: str
    max_context_length: int | None
    enable_lora: bool
    lora_rank: int | None
    lora_alpha: float | None
    vocab_size: int
    output_dir: str
    ready: bool


class GetStatus(Message, frozen=True):
    """How the service is; answered by Status."""


class SessionStatus(Message, frozen=True):
    """A session, or a model without one."""

    session_id: str
    models: list[str]
    num_requests: int
    last_active: float


class ErrorSeen(Message, frozen=True):
    """A request that failed, without any of its data."""

    time: float
    model_id: str | None
    operation: str
    message: str


class Status(Message, frozen=True):
    """For the status page, `xorl serve status` and /metrics.

    counters and gauges: by the name that Prometheus gets, of letters, digits and _, labels in their own text form:
    `requests_total{operation="forward_backward"}`.
    """

    started: float
    ready: bool
    workers_connected: bool
    world_size: int
    queue_depth: int
    running: list[str]
    tokens_per_second: float
    sessions: list[SessionStatus]
    gpu_bytes_used: list[int]
    gpu_bytes_total: list[int]
    last_errors: list[ErrorSeen]
    counters: dict[str, float]
    gauges: dict[str, float]


class CreateSession(Message, frozen=True):
    """Begin a session, of that id where the client has chosen one; answered by SessionCreated."""

    session_id: str | None = None
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, str] = msgspec.field(default_factory=dict)
    display_name: str | None = None


class SessionCreated(Message, frozen=True):
    """Of CreateSession; info_message is shown to the user by the client."""

    session_id: str
    info_message: str | None = None


class Heartbeat(Message, frozen=True):
    """The client of a session, or of a model without one, lives; Ok, or Rejected(410) when it has ended."""

    session_id: str


class FinishSession(Message, frozen=True):
    """The client has ended the session: its models are saved as when idle, and released. Ok."""

    session_id: str
    reason: str


class GetSession(Message, frozen=True):
    """Answered by SessionInfo."""

    session_id: str


class ListSessions(Message, frozen=True):
    """Answered by Sessions."""

    limit: int = 20
    offset: int = 0


class SessionInfo(Message, frozen=True):
    """A session and what was made in it."""

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
    """Of ListSessions, newest first."""

    sessions: list[SessionInfo]
    total: int


class GetModel(Message, frozen=True):
    """Answered by ModelInfo; Rejected(404) where there is no such model, 410 where it has been released."""

    model_id: str


class ModelInfo(Message, frozen=True):
    """A model that is loaded. lora: None for full weights."""

    model_id: str
    base_model: str
    arch: str
    tokenizer: str
    lora: LoraSpec | None
    step: int
    user_metadata: dict[str, str]


class CreateSamplingSession(Message, frozen=True):
    """Begin to sample from a checkpoint, or from the base where it is None; answered by SamplingSession.

    sampling_session_id: chosen by the API from the client's session and number, the natural key; None for a client
    that has no sessions and samples by name.
    """

    sampling_session_id: str | None
    session_id: str | None
    base_model: str | None
    checkpoint: CheckpointRef | None


class GetSampler(Message, frozen=True):
    """Answered by SamplingSession."""

    sampling_session_id: str


class SamplingSession(Message, frozen=True):
    """What a sampling session samples from. name: under which NamedSampler finds it."""

    sampling_session_id: str
    base_model: str
    checkpoint: CheckpointRef | None
    name: str | None


class ListCheckpoints(Message, frozen=True):
    """Of one model, or of all; answered by CheckpointList. limit None: all."""

    model_id: str | None = None
    limit: int | None = None
    offset: int = 0


class CheckpointInfo(Message, frozen=True):
    """A checkpoint that is there."""

    checkpoint: CheckpointRef
    created: float
    size_bytes: int
    user_metadata: dict[str, str]
    expires: float | None = None


class CheckpointList(Message, frozen=True):
    """Of ListCheckpoints, newest first."""

    checkpoints: list[CheckpointInfo]
    total: int


class DeleteCheckpoint(Message, frozen=True):
    """Ok, or Rejected(404)."""

    checkpoint: CheckpointRef


class SetCheckpointTtl(Message, frozen=True):
    """Delete the checkpoint after so long from now; None, never. Ok, or Rejected(404)."""

    checkpoint: CheckpointRef
    ttl_s: float | None


class GetWeightsInfo(Message, frozen=True):
    """Answered by WeightsInfo."""

    checkpoint: CheckpointRef


class WeightsInfo(Message, frozen=True):
    """What a checkpoint is of. lora: None for full weights."""

    base_model: str
    lora: LoraSpec | None
    size_bytes: int
    step: int


class ListTrainingRuns(Message, frozen=True):
    """Models that are, or have left checkpoints; answered by TrainingRuns."""

    limit: int = 20
    offset: int = 0


class GetTrainingRun(Message, frozen=True):
    """Answered by TrainingRun."""

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
    """Of ListTrainingRuns, those active last first."""

    runs: list[TrainingRun]
    total: int


class AddEndpoint(Message, frozen=True):
    """Ask an endpoint how it is and register it; answered by EndpointState."""

    endpoint: Endpoint
    group_name: str = "weight_sync_group"
    master_address: str = ""
    master_port: int = 0
    buffer_size_mb: int = 1024


class RemoveEndpoint(Message, frozen=True):
    """Ok, or Rejected(404)."""

    host: str
    port: int


class ListEndpoints(Message, frozen=True):
    """Answered by Endpoints."""


class ConnectEndpoints(Message, frozen=True):
    """Ask the registered endpoints how they are, now; answered by Endpoints."""

    master_address: str = ""
    master_port: int = 0
    group_name: str = "weight_sync_group"


class SetSyncQuantization(Message, frozen=True):
    """How weights are sent from now on where a sync does not say it; None as the model has them. Answered by Ok."""

    quantization: BlockFp8 | None


class DisconnectEndpoints(Message, frozen=True):
    """Use the registered endpoints no more until ConnectEndpoints; answered by Endpoints."""


class EndpointState(Message, frozen=True):
    """A registered endpoint. state: failed is one that may hold mixed weights, not used until it is removed."""

    endpoint: Endpoint
    state: Literal["healthy", "unreachable", "disconnected", "failed"]
    message: str = ""
    weight_version: str | None = None
    server_info: dict[str, str | int | float | bool | None] = msgspec.field(default_factory=dict)


class Endpoints(Message, frozen=True):
    """Of ListEndpoints, in the order in which they were added."""

    endpoints: list[EndpointState]


Request = (
    Submit
    | Tombstone
    | Poll
    | Cancel
    | GetService
    | GetStatus
    | CreateSession
    | Heartbeat
    | FinishSession
    | GetSession
    | ListSessions
    | GetModel
    | CreateSamplingSession
    | GetSampler
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
    | Ok
    | ServiceInfo
    | Status
    | SessionCreated
    | SessionInfo
    | Sessions
    | ModelInfo
    | SamplingSession
    | CheckpointInfo
    | CheckpointList
    | WeightsInfo
    | TrainingRun
    | TrainingRuns
    | EndpointState
    | Endpoints
)
"""Orchestrator -> API."""
