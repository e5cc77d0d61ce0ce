"""State shared by the parts of the orchestrator: open requests, counters, and ending requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from xorl.server.identifiers import CheckpointRef
from xorl.server.messages import CANCELLED, Operation, Result
from xorl.server.operations import CreateModel, Failure, SampleResult, Saved
from xorl.server.orchestrator import catalogue
from xorl.server.orchestrator.catalogue import CheckpointFolder
from xorl.server.orchestrator.checkpoint_reads import CheckpointReads
from xorl.server.orchestrator.commit import JournalError
from xorl.server.orchestrator.inference import Inference
from xorl.server.orchestrator.journal import Journal, Outcome, Record
from xorl.server.orchestrator.lane import Ticket
from xorl.server.orchestrator.operation_properties import RECOVERY_PREFIX, encode
from xorl.server.orchestrator.options import OrchestratorOptions
from xorl.server.orchestrator.progress import ProgressLog
from xorl.server.orchestrator.registry import ModelRecord, Registry, model_of_lane, stored
from xorl.server.orchestrator.scheduler import Scheduler
from xorl.server.orchestrator.storage import StorageMeter
from xorl.server.orchestrator.workers import Workers
from xorl.server.status_queries import ErrorSeen

logger = logging.getLogger(__name__)

NUM_ERRORS_SHOWN = 20
# Throughput is averaged over the last minute.
RATE_WINDOW_S = 60.0
# The status shows ten minutes of throughput.
RATE_INTERVAL_S, NUM_INTERVALS = 10.0, 60
RETRY_WRITE_S = 1.0


@dataclass(frozen=True)
class Suspension:
    """A request that the workers have begun, and suspended to run others.

    Attributes:
        workers: the incarnation that holds what has been computed.
        operation: the prepared operation; for a pass, without its data.
        num_tokens: the number of tokens of a pass.
        seconds: the workers' time for it so far.
    """

    workers: str
    operation: Operation
    num_tokens: int
    seconds: float


@dataclass
class OpenRequest:
    """An acknowledged request that has not ended.

    Attributes:
        kind: the class name of its operation, or the kind of an internal request.
        attempts, begun_by: as in `journal.Unfinished`.
        running_since: when it was sent to the workers or to an endpoint; None while it waits.
        needs_workers: whether no endpoint can run it.
        endpoint_task: the task in which an endpoint runs it, if one does.
        is_cancelled: whether the client has cancelled it.
        suspended: set while it waits to be resumed.
        waits_for: why it is postponed, if it is: it is then neither queued nor running. waiting_since: when it was
            first postponed.
        waiters: futures of the polls that wait for its end.
    """

    ticket: Ticket
    kind: str
    attempts: int = 0
    begun_by: str | None = None
    running_since: float | None = None
    needs_workers: bool = False
    is_cancelled: bool = False
    suspended: Suspension | None = None
    waits_for: str | None = None
    waiting_since: float | None = None
    endpoint_task: asyncio.Task[SampleResult | None] | None = None
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        """Whether it was sent to the workers or to an endpoint."""
        return self.running_since is not None


class Counters:
    """Counters by their Prometheus name, the last errors, and the token throughput."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.errors: deque[ErrorSeen] = deque(maxlen=NUM_ERRORS_SHOWN)
        self._tokens: deque[tuple[float, int]] = deque()
        self._intervals: Counter[int] = Counter()  # tokens, keyed by the interval's number

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        text = ",".join(f'{label}="{value}"' for label, value in labels.items())
        self.totals[f"{name}{{{text}}}" if text else name] += amount  # pyright: ignore[reportArgumentType]

    def count_tokens(self, num_tokens: int) -> None:
        """Count tokens that have just been processed."""
        self.count("tokens_total", num_tokens)
        self._tokens.append((time.monotonic(), num_tokens))
        self._intervals[int(time.monotonic() / RATE_INTERVAL_S)] += num_tokens
        self._forget()

    def tokens_per_second(self) -> float:
        """The average over the last minute."""
        self._forget()
        return sum(count for _, count in self._tokens) / RATE_WINDOW_S

    def token_rates(self) -> list[float]:
        """Tokens per second in each of the last complete intervals, the oldest first."""
        self._forget()
        now = int(time.monotonic() / RATE_INTERVAL_S)
        return [self._intervals[number] / RATE_INTERVAL_S for number in range(now - NUM_INTERVALS, now)]

    def _forget(self) -> None:
        oldest = int(time.monotonic() / RATE_INTERVAL_S) - NUM_INTERVALS
        for number in [number for number in self._intervals if number < oldest]:
            del self._intervals[number]
        while self._tokens and self._tokens[0][0] < time.monotonic() - RATE_WINDOW_S:
            self._tokens.popleft()


@dataclass
class State:
    """The shared state of one orchestrator.

    Attributes:
        open: the requests that have not ended, by id.
        wake: set when there may be requests to start.
        retrieved: ids of results that were fetched since the journal last recorded them.
        storage_problem: why the journal cannot be written at the moment, for example a full disk; shown to pollers.
        unsaved: by lane and number, when a request was last refused because the journal could not be written, as a
            time of `time.monotonic`.
        progress: the training progress of each model.
        deleting: checkpoints that are being deleted; no request may start from them.
        reads: the checkpoints that the workers are reading.
        serving: by lane, the running save of a model's current weights for sampling by the model's id.
        keeping: lock held while deleted checkpoints are renamed, or finally removed.
    """

    options: OrchestratorOptions
    journal: Journal
    registry: Registry
    scheduler: Scheduler
    workers: Workers
    inference: Inference
    open: dict[str, OpenRequest]
    wake: asyncio.Event
    counters: Counters = field(default_factory=Counters)
    retrieved: set[str] = field(default_factory=set)
    started: float = field(default_factory=time.time)
    storage_problem: str | None = None
    unsaved: dict[tuple[str, int], float] = field(default_factory=dict)
    deleting: set[CheckpointRef] = field(default_factory=set)
    progress: ProgressLog = field(default_factory=ProgressLog)
    reads: CheckpointReads = field(default_factory=CheckpointReads)
    serving: dict[str, asyncio.Task[Saved | Failure]] = field(default_factory=dict)
    keeping: asyncio.Lock = field(default_factory=asyncio.Lock)
    storage: StorageMeter = field(default_factory=StorageMeter)
    _locks: WeakValueDictionary[CheckpointRef, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def admit(self, ticket: Ticket, kind: str, *, attempts: int = 0, begun_by: str | None = None) -> None:
        """Queue a request that is already in the journal."""
        self.open[ticket.request_id] = OpenRequest(ticket, kind, attempts, begun_by)
        self.scheduler.add(ticket)
        self.wake.set()

    async def end(self, outcomes: Sequence[Outcome], results: Sequence[Result]) -> None:
        """Write outcomes to the journal, retrying while the disk is full, then wake the requests' pollers.

        outcomes and results belong to the same requests, in the same order. The caller updates the scheduler.
        """
        while True:
            try:
                await self.journal.finish(outcomes)
                break
            except JournalError as problem:
                self.storage_problem = f"results cannot be saved: {problem}"
                logger.error("event=journal_failed why=%r", str(problem))
                await asyncio.sleep(RETRY_WRITE_S)
        self.storage_problem = None
        for outcome, result in zip(outcomes, results, strict=True):
            request = self.open.pop(outcome.request_id, None)
            if request is None:
                continue
            self._count_end(request, outcome, result)
            for waiter in request.waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def cancel_queued(self, ticket: Ticket) -> None:
        """End a request that was dropped from the scheduler. Its number is skipped, even after a restart."""
        await self.fail([ticket], CANCELLED, skips_numbers=True)

    async def fail(self, tickets: Sequence[Ticket], failure: Failure, *, skips_numbers: bool = False) -> None:
        """End requests that changed nothing and are no longer in the scheduler.

        If one of them would have created a model, that model fails with all its queued requests.
        """
        ended = list(tickets)
        for ticket in tickets:
            request, model = self.open.get(ticket.request_id), self.model_of(ticket)
            if model is None or request is None or request.kind != CreateModel.__name__:
                continue
            # Workers that are merely unreachable may have created it.
            model.state, model.replaces = "failed", True
            if self.scheduler.has_lane(model.lane):
                ended += self.scheduler.close_lane(model.lane)
        now, body = time.time(), encode(failure)
        outcomes = [
            Outcome(
                t.request_id,
                body,
                now,
                lane=t.lane,
                records=self.leave_order(t),
                skipped=t.seq if skips_numbers else None,
            )
            for t in ended
        ]
        await self.end(outcomes, [failure for _ in ended])

    def invalidate_models(self, tickets: Iterable[Ticket]) -> None:
        """Require the models of abandoned requests to be restored before they are used again.

        Workers that are merely unreachable may have run such a request, so their models can differ from the journal.
        """
        for model in filter(None, map(self.model_of, tickets)):
            model.workers = None

    def model_of(self, ticket: Ticket) -> ModelRecord | None:
        """The model in whose lane a ticket is; None if it has no lane, or if the model has been recreated since."""
        model = self.registry.models.get(model_of_lane(ticket.lane)) if ticket.lane else None
        return model if model is not None and model.lane == ticket.lane else None

    def leave_order(self, ticket: Ticket) -> list[Record]:
        """Update the next number of a model after a request has left its lane; returns the record to write."""
        model = self.model_of(ticket)
        if model is None:
            return []
        if self.scheduler.has_lane(model.lane):
            model.next_seq = self.scheduler.next_unended(model.lane, ticket)
        return [stored(model)]

    @asynccontextmanager
    async def checkpoint_lock(self, checkpoint: CheckpointRef) -> AsyncIterator[None]:
        """Hold this lock while changing a checkpoint's files or its record.

        Without it, a deletion could remove the files of a concurrent save and leave its record.
        """
        async with self._locks.setdefault(checkpoint, asyncio.Lock()):
            yield

    def is_locked(self, checkpoint: CheckpointRef) -> bool:
        """Whether somebody holds the lock of a checkpoint."""
        lock = self._locks.get(checkpoint)
        return lock is not None and lock.locked()

    def is_unavailable(self, checkpoint: CheckpointRef) -> bool:
        """Whether a checkpoint is being deleted or has expired: nothing may start from it."""
        return checkpoint in self.deleting or self.registry.has_expired(checkpoint, time.time())

    def find_checkpoint(self, checkpoint: CheckpointRef) -> CheckpointFolder | None:
        """A client's checkpoint on disk; None if it does not exist or is unavailable."""
        is_hidden = checkpoint.name.startswith(RECOVERY_PREFIX) or self.is_unavailable(checkpoint)
        return None if is_hidden else catalogue.find(self.options.folder, checkpoint)

    def _count_end(self, request: OpenRequest, outcome: Outcome, result: Result) -> None:
        if not isinstance(result, Failure):
            self.counters.count("operations_total", operation=request.kind)
            return
        if result == CANCELLED:
            self.counters.count("cancelled_total", operation=request.kind)
            return
        self.counters.count("failures_total", operation=request.kind)
        model = model_of_lane(request.ticket.lane) if request.ticket.lane else None
        self.counters.errors.append(ErrorSeen(outcome.finished, model, request.kind, result.message))
        logger.warning("event=request_failed kind=%s model=%s why=%r", request.kind, model, result.message)
