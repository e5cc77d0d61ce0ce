"""The messages between the service's processes that carry operations and results.

API -> orchestrator: Submit, Poll, Cancel, and the queries in `queries`. Orchestrator -> worker: Work, answered by Done,
and Cancel of a sample in it, answered by Ok while the work goes on.
`channel` transports them. Whoever changes a message here, in `queries` or in `operations`, or what one means, raises
PROTOCOL_VERSION.
"""

from __future__ import annotations

from typing import Literal

from xorl.server.identifiers import Dialect
from xorl.server.operations import ClientOperation, ClientResult, Failure, ForwardBackward, Message, Sample

PROTOCOL_VERSION = 7


class Health(Message, frozen=True):
    """Ask how the workers are; the first message they get."""


class Shutdown(Message, frozen=True):
    """Finish and exit."""


class HealthResult(Message, frozen=True):
    """Result of Health: the number of ranks, and the memory of each rank's GPU (empty without GPUs).

    max_context_length: the tokens that the model has positions for.
    """

    world_size: int
    gpu_bytes_used: list[int]
    gpu_bytes_total: list[int]
    max_context_length: int


class ShutdownResult(Message, frozen=True):
    """Result of Shutdown."""


Operation = ClientOperation | Health | Shutdown
Result = ClientResult | HealthResult | ShutdownResult


class Work(Message, frozen=True):
    """Operations to run together: several ForwardBackward or several Sample, of any models; others only alone."""

    ids: list[str]
    operations: list[Operation]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.operations) or not self.ids:
            raise ValueError(f"work has an id for each operation, got {len(self.ids)} and {len(self.operations)}")
        kinds = {type(operation) for operation in self.operations}
        if len(self.ids) > 1 and kinds not in ({ForwardBackward}, {Sample}):
            raise ValueError("only ForwardBackward, and only Sample, may come together")


class Done(Message, frozen=True):
    """Answer to Work: the result of each operation, in their order."""

    ids: list[str]
    results: list[Result]


class Submit(Message, frozen=True):
    """Accept an operation. The answer Accepted means that it is in the journal and survives a crash.

    request_id: a random id that the API proposes; sent again (the API lost the answer), it means the same request.
    key: the natural key, the same in every retry of the client; None if it has none. A key that is known already means
    the same request if body_hash is the same too, and its id is answered; with another body_hash it is Rejected(400).
    The keys of a model are forgotten when it is created anew.
    seq_id: the number of the operation in its model's order; None puts it behind everything submitted so far.
    """

    request_id: str
    operation: ClientOperation
    dialect: Dialect
    body_hash: bytes
    key: str | None = None
    seq_id: int | None = None
    session_id: str | None = None


class Tombstone(Message, frozen=True):
    """The API refused the request with this seq_id of the model, so it will never come. Answered by Ok."""

    model_id: str
    seq_id: int


class Accepted(Message, frozen=True):
    """Answer to Submit: the id to poll, which is the proposed one or, for a retry, that of the first request."""

    request_id: str


class Rejected(Message, frozen=True):
    """Answer to a Submit or a query that is refused: the HTTP status, and what the client can do."""

    status: int
    message: str


class Poll(Message, frozen=True):
    """Ask for the result of a request. Answered as soon as there is one, or after wait_s (at most 30)."""

    request_id: str
    wait_s: float


class Pending(Message, frozen=True):
    """Answer to Poll: no result yet. position: how many requests, of all clients, are before it; None if it runs."""

    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    position: int | None = None
    reason: str | None = None


class Finished(Message, frozen=True):
    """Answer to Poll: the result, which can be polled again for a while. dialect: of the client that submitted it."""

    request_id: str
    dialect: Dialect
    result: ClientResult


class Unknown(Message, frozen=True):
    """Answer to Poll: no such request. was_known: there was one, but its result is not kept any more."""

    request_id: str
    was_known: bool = False


class Cancel(Message, frozen=True):
    """End a sample, whether it waits or runs; its result is CANCELLED. Answered by Ok, also where it is over.

    Whatever belongs to a model's order runs on.
    """

    request_id: str


CANCELLED = Failure("user", 410, "the request was cancelled")


class Ok(Message, frozen=True):
    """Done, with nothing to say."""
