"""A request on its way to the workers: the message for them, and the consequences of how it ended there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from xorl.server.messages import CANCELLED, Operation, Result, Resume, Work
from xorl.server.operations import Failure, ForwardBackward, OptimStep, Sample
from xorl.server.orchestrator.lane import Ticket
from xorl.server.orchestrator.preflight import CannotRun
from xorl.server.orchestrator.state import OpenRequest, Suspension

logger = logging.getLogger(__name__)

# Operations that may run while the previous result of their model is still being written (`runs_ahead`).
RUN_AHEAD = (ForwardBackward, OptimStep)


@dataclass(frozen=True)
class Dispatch:
    """A request with its prepared operation. workers: the name of the incarnation that runs it, or None.

    resumed: the suspension, if the workers have suspended the request; `operation` is then the suspension's.
    """

    ticket: Ticket
    request: OpenRequest
    operation: Operation
    workers: str | None
    resumed: Suspension | None = None

    @property
    def sent(self) -> Operation:
        """The operation to send to the workers."""
        return Resume() if self.resumed is not None and isinstance(self.operation, ForwardBackward) else self.operation

    @property
    def num_tokens(self) -> int:
        """The number of tokens of a pass."""
        if self.resumed is not None:
            return self.resumed.num_tokens
        if not isinstance(self.operation, ForwardBackward):
            return 0
        return sum(datum.tokens.shape[0] for datum in self.operation.data)

    def total_seconds(self, seconds: float) -> float:
        """The workers' time for the request, including `seconds` for this turn."""
        return seconds if self.resumed is None else self.resumed.seconds + seconds

    def suspended(self, seconds: float) -> Suspension:
        """The state from which to continue after the workers have suspended it. seconds: the time of this turn."""
        assert self.workers is not None, "only workers suspend requests"
        # The workers keep the data, which may be large.
        light = replace(self.operation, data=[]) if isinstance(self.operation, ForwardBackward) else self.operation
        return Suspension(self.workers, light, self.num_tokens, self.total_seconds(seconds))


def work_of(dispatches: Sequence[Dispatch]) -> Work:
    """The message that runs or resumes requests. A pass that several requests share is short and is not suspended."""
    operations = [dispatch.operation for dispatch in dispatches]
    may_suspend = isinstance(operations[0], Sample) or (len(operations) == 1 and isinstance(operations[0], RUN_AHEAD))
    ids = [dispatch.ticket.request_id for dispatch in dispatches]
    return Work(ids, [dispatch.sent for dispatch in dispatches], may_suspend=may_suspend)


def runs_ahead(dispatch: Dispatch, result: Result) -> bool:
    """Whether the model's next request may run while this result is being written to disk.

    If this process dies before the write, the next one gets the same result from the workers, which remember it under
    the request's id. The workers do not remember failures: retrying a failed request after its successor has run would
    change the order.
    """
    return isinstance(dispatch.operation, RUN_AHEAD) and not isinstance(result, Failure)


def refuse_cancelled(request: OpenRequest, workers: str | None) -> None:
    """Raise CannotRun for a cancelled request, unless these workers may have computed it: they know how it ended."""
    if request.is_cancelled and (request.ticket.lane is None or request.begun_by != workers):
        raise CannotRun(CANCELLED)


def failure_of(request: OpenRequest, problem: Exception) -> Failure:
    """The result of a request that cannot run.

    Unexpected errors also end the request; otherwise every restart would fail on it again.
    """
    if isinstance(problem, CannotRun):
        return problem.failure
    logger.error("event=not_prepared request=%s kind=%s", request.ticket.request_id, request.kind, exc_info=problem)
    error = f"{type(problem).__name__}: {problem}"
    return Failure("server", 500, f"this did not run, since the service failed to prepare it ({error}). See its log")
