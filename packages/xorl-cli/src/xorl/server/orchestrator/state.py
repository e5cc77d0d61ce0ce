"""The state that the parts of the orchestrator share: open requests, counters, and how a request ends."""

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
from xorl.server.messages import CANCELLED, Result
from xorl.server.operations import CreateModel, Failure, SampleResult
from xorl.server.orchestrator.calls import encode
from xorl.server.orchestrator.commit import JournalError
from xorl.server.orchestrator.inference import Inference
from xorl.server.orchestrator.journal import Journal, Outcome, Record
from xorl.server.orchestrator.lane import Ticket
from xorl.server.orchestrator.options import OrchestratorOptions
from xorl.server.orchestrator.registry import ModelRecord, Registry, checkpoint_key, stored
from xorl.server.orchestrator.scheduler import Scheduler
from xorl.server.orchestrator.workers import Workers
from xorl.server.queries import ErrorSeen

logger = logging.getLogger(__name__)

NUM_ERRORS_SHOWN = 20
# Throughput is what happened in the last minute.
RATE_WINDOW_S = 60.0


@dataclass
class OpenRequest:
    """A request that was acknowledged and has not ended. is_running: the workers or an endpoint have it.
    is_for_workers: no endpoint can do it. asking: an endpoint that does it. is_cancelled: nobody wants its result."""

    ticket: Ticket
    kind: str
    attempts: int = 0
    begun_by: str | None = None
    is_running: bool = False
    is_for_workers: bool = False
    is_cancelled: bool = False
    asking: asyncio.Task[SampleResult | None] | None = None
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


class Tally:
    """Counters by the name that Prometheus gets, and tokens a second."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.errors: deque[ErrorSeen] = deque(maxlen=NUM_ERRORS_SHOWN)
        self._tokens: deque[tuple[float, int]] = deque()

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        text = ",".join(f'{label}="{value}"' for label, value in labels.items())
        self.counters[f"{name}{{{text}}}" if text else name] += amount  # pyright: ignore[reportArgumentType]

    def count_tokens(self, num_tokens: int) -> None:
        """Tokens that the workers have just passed through the model."""
        self.count("tokens_total", num_tokens)
        self._tokens.append((time.monotonic(), num_tokens))
        self._forget()

    def tokens_per_second(self) -> float:
        """The average over the last minute."""
        self._forget()
        return sum(count for _, count in self._tokens) / RATE_WINDOW_S

    def _forget(self) -> None:
        while self._tokens and self._tokens[0][0] < time.monotonic() - RATE_WINDOW_S:
            self._tokens.popleft()


@dataclass
class State:
    """One orchestrator's. open: the requests that have not ended, by id. wake: set when there may be work to start.

    problem: why results cannot be kept at the moment (a full disk), for those who wait. deleting: checkpoints that are
    being removed, which no model may be made from any more.
    """

    options: OrchestratorOptions
    journal: Journal
    registry: Registry
    scheduler: Scheduler
    workers: Workers
    inference: Inference
    open: dict[str, OpenRequest]
    wake: asyncio.Event
    tally: Tally = field(default_factory=Tally)
    retrieved: set[str] = field(default_factory=set)
    started: float = field(default_factory=time.time)
    problem: str | None = None
    deleting: set[CheckpointRef] = field(default_factory=set)
    _names: WeakValueDictionary[CheckpointRef, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def admit(self, ticket: Ticket, kind: str, *, attempts: int = 0, begun_by: str | None = None) -> None:
        """Queue a request that is in the journal."""
        self.open[ticket.request_id] = OpenRequest(ticket, kind, attempts, begun_by)
        self.scheduler.add(ticket)
        self.wake.set()

    async def end(self, outcomes: Sequence[Outcome], results: Sequence[Result]) -> None:
        """Keep results, then tell who waits; the scheduler is the caller's. Waits for a disk that is full.

        outcomes and results are of the same requests.
        """
        while True:
            try:
                await self.journal.finish(outcomes)
                break
            except JournalError as problem:
                self.problem = f"results cannot be kept: {problem}"
                logger.error("event=journal_failed why=%r", str(problem))
                await asyncio.sleep(1.0)
        self.problem = None
        for outcome, result in zip(outcomes, results, strict=True):
            request = self.open.pop(outcome.request_id, None)
            if request is None:
                continue
            self._tally(request, outcome, result)
            for waiting in request.waiting:
                if not waiting.done():
                    waiting.set_result(None)

    async def fail(self, tickets: Sequence[Ticket], failure: Failure) -> None:
        """End requests that the scheduler does not hold any more, and that changed nothing.

        A model that one of them was to create is dropped, with all that waits for it.
        """
        ended = list(tickets)
        for model in filter(None, map(self._created_by, tickets)):
            # Workers that are only out of reach may have made it.
            model.state, model.replaces = "failed", True
            if self.scheduler.has_lane(model.lane):
                ended += self.scheduler.close_lane(model.lane)
        now, body = time.time(), encode(failure)
        outcomes = [Outcome(t.request_id, body, now, records=self.passed(t)) for t in ended]
        await self.end(outcomes, [failure for _ in ended])

    def doubt(self, tickets: Iterable[Ticket]) -> None:
        """Have the models of requests that are given up made again before they are used.

        If the workers are only out of reach, they may have done it: what they hold is not what the journal has.
        """
        for model in filter(None, map(self.model_of, tickets)):
            model.workers = None

    def model_of(self, ticket: Ticket) -> ModelRecord | None:
        """The model whose order a ticket keeps; None where there is none, or another has taken its id since."""
        model = self.registry.models.get(ticket.lane.rpartition("#")[0]) if ticket.lane else None
        return model if model is not None and model.lane == ticket.lane else None

    def passed(self, ticket: Ticket) -> list[Record]:
        """What is to be kept where a request has left its model's order."""
        model = self.model_of(ticket)
        if model is None:
            return []
        if self.scheduler.has_lane(model.lane):
            model.next_seq = self.scheduler.next_seq(model.lane)
        return [stored(model)]

    @asynccontextmanager
    async def naming(self, checkpoint: CheckpointRef) -> AsyncIterator[None]:
        """Around whatever changes what a checkpoint's name stands for, on the disk and in its record.

        Saves and removals take turns: otherwise, one removes the files of the other, which a record says are there.
        """
        async with self._names.setdefault(checkpoint, asyncio.Lock()):
            yield

    def is_gone(self, checkpoint: CheckpointRef) -> bool:
        """Whether a checkpoint is being removed, or is to be since its time is over: nothing may begin with it."""
        record = self.registry.checkpoints.get(checkpoint_key(checkpoint))
        return checkpoint in self.deleting or (record is not None and record.is_over(time.time()))

    def _created_by(self, ticket: Ticket) -> ModelRecord | None:
        request = self.open.get(ticket.request_id)
        return self.model_of(ticket) if request is not None and request.kind == CreateModel.__name__ else None

    def _tally(self, request: OpenRequest, outcome: Outcome, result: Result) -> None:
        if not isinstance(result, Failure):
            self.tally.count("operations_total", operation=request.kind)
            return
        if result == CANCELLED:
            self.tally.count("cancelled_total", operation=request.kind)
            return
        self.tally.count("failures_total", operation=request.kind)
        model = request.ticket.lane.rpartition("#")[0] if request.ticket.lane else None
        self.tally.errors.append(ErrorSeen(outcome.finished, model, request.kind, result.message))
        logger.warning("event=request_failed kind=%s model=%s why=%r", request.kind, model, result.message)
