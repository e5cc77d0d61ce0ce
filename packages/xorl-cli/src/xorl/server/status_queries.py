"""Queries about the service's status that the orchestrator answers at once, and their answers; part of `queries`.

Times are in seconds since 1970.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from xorl.server.endpoint_queries import EndpointState
from xorl.server.operations import Message


class GetStatus(Message, frozen=True):
    """Ask for the service's status; answered by Status."""


class SessionStatus(Message, frozen=True):
    """The status of a session, or of a model without one.

    num_requests: waiting or running requests. is_gone: its client has been silent and waits for nothing.
    """

    session_id: str
    models: list[str]
    num_requests: int
    created: float
    last_active: float
    is_gone: bool = False
    display_name: str | None = None
    user_metadata: dict[str, str] = msgspec.field(default_factory=dict)


class ModelStatus(Message, frozen=True):
    """A model and its training.

    state: creating, ready or released, or absent if it is ready but not on the workers, which restore it for its next
    call. num_requests: waiting or running requests. losses: those of its last steps, the oldest first, each the mean
    over the trained tokens since the previous step; None if the mean is not finite or there were no such tokens.
    last_step, grad_norm and learning_rate: those of the last step. Steps before the orchestrator was started are not
    known.
    """

    model_id: str
    session_id: str | None
    state: str
    lora_rank: int | None
    num_steps: int
    num_requests: int
    created: float
    last_active: float
    last_step: float | None = None
    losses: list[float | None] = msgspec.field(default_factory=list)
    grad_norm: float | None = None
    learning_rate: float | None = None
    user_metadata: dict[str, str] = msgspec.field(default_factory=dict)


class ErrorSeen(Message, frozen=True):
    """A failed request, without its data."""

    time: float
    model_id: str | None
    operation: str
    message: str


class RunningCall(Message, frozen=True):
    """Requests of one kind and of one model or session that the workers or an endpoint are running.

    request_id, since: those of the oldest request. session_id: their session, or their model if it has no session.
    attempts: the highest number of times that workers were lost while running one of them.
    """

    request_id: str
    operation: str
    model_id: str | None
    session_id: str
    since: float
    attempts: int
    num_calls: int = 1


class WaitingCall(Message, frozen=True):
    """A request that is postponed until something else happens, which `reason` names."""

    request_id: str
    operation: str
    model_id: str | None
    reason: str


class ProcessStatus(Message, frozen=True):
    """A process of the service, or all workers together.

    num_restarts: counted since the launcher was started. last_restart: None if there was none; reason: why it was
    necessary. hung_since: None unless the process hangs and is being replaced.
    """

    name: Literal["workers", "orchestrator", "API"]
    num_restarts: int = 0
    last_restart: float | None = None
    reason: str | None = None
    hung_since: float | None = None


StoredName = Literal["training", "sampler", "external", "recovery", "other"]


class StoredKind(Message, frozen=True):
    """The storage that one kind of files takes. recovery: the service's own checkpoints, hidden from clients.

    other: everything except complete checkpoints, such as the journal.
    """

    kind: StoredName
    num_checkpoints: int
    size_bytes: int


class Storage(Message, frozen=True):
    """The storage that output_dir takes, and its limit. kinds: each kind once; together they cover the whole folder."""

    limit_bytes: int
    kinds: list[StoredKind]

    @property
    def used_bytes(self) -> int:
        return sum(kind.size_bytes for kind in self.kinds)


class GetStorage(Message, frozen=True):
    """Ask how much storage is used, measured at most a few seconds ago; answered by Storage."""


class Status(Message, frozen=True):
    """For the status page, `xorl serve status` and /metrics.

    counters and gauges: keyed by Prometheus name (letters, digits and _), including any labels in Prometheus's text
    form: `requests_total{operation="forward_backward"}`. storage: None until it has been measured. token_rates: tokens
    per second in intervals of 10 seconds, the oldest first.
    """

    started: float
    ready: bool
    workers_connected: bool
    world_size: int
    queue_depth: int
    running: list[RunningCall]
    processes: list[ProcessStatus]
    tokens_per_second: float
    token_rates: list[float]
    sessions: list[SessionStatus]
    models: list[ModelStatus]
    endpoints: list[EndpointState]
    gpu_bytes_used: list[int]
    gpu_bytes_total: list[int]
    last_errors: list[ErrorSeen]
    counters: dict[str, float]
    gauges: dict[str, float]
    storage: Storage | None = None
    waiting: list[WaitingCall] = msgspec.field(default_factory=list)
