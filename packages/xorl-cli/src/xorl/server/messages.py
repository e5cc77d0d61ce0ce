"""What the service's processes say to each other: the requests that carry operations and results.

API -> orchestrator: Submit, Poll, Cancel and the queries of `queries`. Orchestrator -> worker: Work, answered by Done.
How they travel is `channel`'s. PROTOCOL_VERSION changes whenever a message here, in `queries` or in `operations`, or
what one means, does.
"""

from __future__ import annotations

from typing import Literal

from xorl.server.names import Dialect
from xorl.server.operations import ClientOperation, ClientResult, ForwardBackward, Message, Sample

PROTOCOL_VERSION = 4


class Health(Message, frozen=True):
    """How the workers are; the first thing that is asked of them."""


class Shutdown(Message, frozen=True):
    """Finish and exit."""


class HealthResult(Message, frozen=True):
    """Of Health: how many ranks there are, and the memory of each one's GPU; none where there are no GPUs."""

    world_size: int
    gpu_bytes_used: list[int]
    gpu_bytes_total: list[int]


class ShutDown(Message, frozen=True):
    """Of Shutdown."""


Operation = ClientOperation | Health | Shutdown
Result = ClientResult | HealthResult | ShutDown


class Work(Message, frozen=True):
    """Operations to run as one: several ForwardBackward or several Sample, of any models; anything else comes alone."""

    ids: list[str]
    operations: list[Operation]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.operations) or not self.ids:
            raise ValueError(f"work has an id for each operation, got {len(self.ids)} and {len(self.operations)}")
        kinds = {type(operation) for operation in self.operations}
        if len(self.ids) > 1 and kinds not in ({ForwardBackward}, {Sample}):
            raise ValueError("only ForwardBackward, and only Sample, may come together")


class Done(Message, frozen=True):
    """Of Work: the result of each operation, in their order."""

    ids: list[str]
    results: list[Result]


class Submit(Message, frozen=True):
    """Take an operation on. Accepted means that it is journaled and survives a crash.

    request_id: a proposal, random; the same proposal again (the API lost the answer) is the same request. key: the
    natural key, the same in every retry of the client; None where it has none. The same key and body_hash is the same
    request, whose id is answered; the same key with another body_hash is Rejected(400). Keys of a model are forgotten
    when it is created anew. seq_id: the place in the model's order; None is behind what has been submitted.
    """

    request_id: str
    operation: ClientOperation
    dialect: Dialect
    body_hash: bytes
    key: str | None = None
    seq_id: int | None = None
    session_id: str | None = None


class Tombstone(Message, frozen=True):
    """This seq_id of the model was refused at the door and will not come; answered by Ok."""

    model_id: str
    seq_id: int


class Accepted(Message, frozen=True):
    """Of Submit: the id to poll, the proposed one or, for a retry, the first one's."""

    request_id: str


class Rejected(Message, frozen=True):
    """Of Submit, or of a query that cannot be answered: the HTTP status and what to do."""

    status: int
    message: str


class Poll(Message, frozen=True):
    """The result of a request; answered at once when there is one, and after wait_s (of at most 30) otherwise."""

    request_id: str
    wait_s: float


class Pending(Message, frozen=True):
    """Of Poll: not yet. position: how many of any client's requests are before it; None where it runs."""

    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    position: int | None = None
    reason: str | None = None


class Finished(Message, frozen=True):
    """Of Poll. dialect: of the Submit, whose client's form the answer takes. It can be asked for again for a while."""

    request_id: str
    dialect: Dialect
    result: ClientResult


class Unknown(Message, frozen=True):
    """Of Poll: there is no such request. was_known: there was, and its result is not kept any more."""

    request_id: str
    was_known: bool = False


class Cancel(Message, frozen=True):
    """Forget a request that has not begun; answered by Ok either way."""

    request_id: str


class Ok(Message, frozen=True):
    """Done, with nothing to say."""
