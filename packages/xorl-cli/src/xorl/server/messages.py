"""Messages between the service's processes that carry operations and results. `channel` transports them.

API -> orchestrator: Submit, Poll, Cancel, and the queries in `queries`. Orchestrator -> worker: Work, answered by Done,
and Cancel of a sample within it, answered by Ok while the work continues.

Raise PROTOCOL_VERSION when a message here, in `queries` or in `operations` changes its fields or its meaning.
"""

from __future__ import annotations

from typing import Literal

from xorl.server.identifiers import Dialect
from xorl.server.operations import ClientOperation, ClientResult, Failure, ForwardBackward, Message, Sample

PROTOCOL_VERSION = 12


class Health(Message, frozen=True):
    """Ask for the workers' status; the first message sent to them."""


class Shutdown(Message, frozen=True):
    """Finish the current work and exit."""


class Resume(Message, frozen=True):
    """Continue the ForwardBackward of this id, which the workers have answered with Suspended."""


class HealthResult(Message, frozen=True):
    """Result of Health: the number of ranks, and the memory of each rank's GPU (empty without GPUs).

    max_context_length: the number of tokens that the model has positions for.
    """

    world_size: int
    gpu_bytes_used: list[int]
    gpu_bytes_total: list[int]
    max_context_length: int


class ShutdownResult(Message, frozen=True):
    """Result of Shutdown."""


class Suspended(Message, frozen=True):
    """Result of a ForwardBackward or a Sample that gave way to other work: the completed share, from 0 to 1.

    The workers keep what they have computed. To continue, send Resume for a pass, or the same Sample again, under the
    same id. A pass that fails or is cancelled restores the gradient from before its first micro-batch.
    """

    done: float


Operation = ClientOperation | Health | Shutdown | Resume
Result = ClientResult | HealthResult | ShutdownResult | Suspended


class Work(Message, frozen=True):
    """Operations to run together: several ForwardBackward or several Sample, for any models, or one other operation.

    may_suspend: whether a single ForwardBackward, or samples, may be answered with Suspended when other work waits.
    """

    ids: list[str]
    operations: list[Operation]
    may_suspend: bool = False

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.operations) or not self.ids:
            raise ValueError(
                f"work must have one id for each of at least one operation, got {len(self.ids)} ids and "
                f"{len(self.operations)} operations"
            )
        kinds = {type(operation) for operation in self.operations}
        if len(self.ids) > 1 and kinds not in ({ForwardBackward}, {Sample}):
            raise ValueError("only operations that are all ForwardBackward or all Sample can run together")


class Done(Message, frozen=True):
    """Answer to Work: the result of each operation, in order."""

    ids: list[str]
    results: list[Result]


class Submit(Message, frozen=True):
    """Accept an operation. The answer Accepted means that the operation is in the journal and survives a crash.

    request_id: a random id that the API proposes. If the API loses the answer, it sends the same id again.
    key: the idempotency key, the same in every retry of the client; None if there is none. A known key with the same
    body_hash is a retry, answered with the id of the first request; with another body_hash it is Rejected(400).
    Recreating a model clears its keys.
    seq_id: the sequence number of the operation among its model's; None puts it behind everything submitted so far.
    source: the client's address and program, as in Unreadable.
    """

    request_id: str
    operation: ClientOperation
    dialect: Dialect
    body_hash: bytes
    key: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    source: str = ""


class Tombstone(Message, frozen=True):
    """The API refused the request with this seq_id, so it will never arrive. Answered by Ok."""

    model_id: str
    seq_id: int


class Unreadable(Message, frozen=True):
    """The API refused a request whose model and seq_id could not be read. Answered by Ok.

    source: the client's address and program. A missing number of this source's requests belongs to this request.
    """

    source: str


class Accepted(Message, frozen=True):
    """Answer to Submit: the id to poll. It is the proposed id or, for a retry, the id of the first request."""

    request_id: str


class Rejected(Message, frozen=True):
    """Answer to a refused Submit or query: the HTTP status, the reason, and what the client can do."""

    status: int
    message: str


class Poll(Message, frozen=True):
    """Ask for the result of a request. Answered once the request ends, or after wait_s (at most 30)."""

    request_id: str
    wait_s: float


class Pending(Message, frozen=True):
    """Answer to Poll: no result yet. position: the number of queued requests ahead, of all clients; None if running."""

    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    position: int | None = None
    reason: str | None = None


class Finished(Message, frozen=True):
    """Answer to Poll: the result, which can be polled again for a while. dialect: that of the submitting client."""

    request_id: str
    dialect: Dialect
    result: ClientResult


class Unknown(Message, frozen=True):
    """Answer to Poll: no such request. was_known: it existed, but its result has been deleted."""

    request_id: str
    was_known: bool = False


class Cancel(Message, frozen=True):
    """End a request early, if it has not begun, or is a sample or a pass between two micro-batches.

    The result of an ended request is CANCELLED.

    The orchestrator answers with CancelOutcome, or with Unknown for an unknown id; the workers answer with Ok.
    """

    request_id: str


class CancelOutcome(Message, frozen=True):
    """Answer of the orchestrator to Cancel.

    status: cancelled if the request's result is CANCELLED, cancelling if it is being ended, running if it has begun and
    will run to its end, finished if it had already ended.
    """

    request_id: str
    status: Literal["cancelled", "cancelling", "running", "finished"]


CANCELLED = Failure("user", 410, "the request was cancelled")


class Ok(Message, frozen=True):
    """Success, without a result."""
