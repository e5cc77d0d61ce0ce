"""Runs the requests that the scheduler says are next on the workers, and writes their results to the journal."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass

from xorl.server.messages import CANCELLED, Operation, Result, Work
from xorl.server.operations import (
    CreateModel,
    Failure,
    ForwardBackward,
    OptimResult,
    OptimStep,
    Sample,
    SampleResult,
    Saved,
    SaveWeights,
    SyncResult,
    SyncWeights,
    Unloaded,
    UnloadModel,
)
from xorl.server.orchestrator import checkpoint_queries
from xorl.server.orchestrator.admission import Admission
from xorl.server.orchestrator.calls import (
    AFTER_STEP,
    INITIAL_NAME,
    RELEASE,
    decode_operation,
    encode,
    saved_as,
)
from xorl.server.orchestrator.commit import Damaged, JournalError
from xorl.server.orchestrator.effects import Effects
from xorl.server.orchestrator.eviction import Eviction, recovery_save
from xorl.server.orchestrator.journal import Outcome
from xorl.server.orchestrator.lane import Ticket
from xorl.server.orchestrator.preflight import CannotRun, CheckpointInUse, Preflight
from xorl.server.orchestrator.registry import ModelRecord
from xorl.server.orchestrator.state import OpenRequest, State
from xorl.server.orchestrator.workers import LOOK_EVERY_S, Incarnation, WorkersLost

logger = logging.getLogger(__name__)

# While the workers compute one piece of work, the next one is on its way to them; more would only undo fair turns.
NUM_SLOTS = 2
# A disk that is full is asked again after so long.
RETRY_S = 1.0
# A model is saved before running its tail again would take longer than this, in seconds of the workers ...
MAX_TAIL_S = 600.0
# ... or its bodies more of the disk; but no more than a thirtieth of the workers' time goes into it.
MAX_TAIL_BYTES = 1024**3
TAIL_PER_SAVE = 30.0
# Requests that may run while the result before theirs is being written, as theirs is while the next one runs.
RUN_AHEAD = (ForwardBackward, OptimStep)


@dataclass(frozen=True)
class Call:
    """A request on its way to workers, by name; None for none. operation: as they get it."""

    ticket: Ticket
    request: OpenRequest
    operation: Operation
    workers: str | None


class Runner:
    """Runs requests until it is cancelled.

    A result is in the journal before any client is told of it. While it is being written, the next request of its model
    may run only if both are gradients or steps (`_runs_ahead`). If the workers die, the requests they had are queued
    again, and their models are made again before these run.
    """

    def __init__(self, state: State, admission: Admission) -> None:
        self._state = state
        self._admission = admission
        self._effects = Effects(state)
        self._models = Eviction(state, self._effects)
        self._preflight = Preflight(state, self._models)
        self._slots = NUM_SLOTS
        self._tasks: set[asyncio.Task[None]] = set()
        self._elsewhere: set[asyncio.Task[None]] = set()
        self._marks: set[asyncio.Future[None]] = set()
        self._keeping: dict[str, asyncio.Event] = {}  # by lane, until its last result is in the journal
        self._saving: set[str] = set()

    async def drive(self) -> None:
        """Start every request that can run, whenever something may have changed."""
        state = self._state
        while True:
            await state.wake.wait()
            state.wake.clear()
            while self._slots > 0 and state.workers.is_ready and (group := state.scheduler.take()):
                self._slots -= 1
                task = asyncio.create_task(self._run(group))
                self._tasks.add(task)
                task.add_done_callback(self._finished)

    async def save_models(self) -> None:
        """Start nothing more, wait for what runs, and save what the workers hold, so that nothing has to run again.

        Once the workers are away there is nothing left to wait for: the next start runs again what they had.
        """
        self._slots = -NUM_SLOTS
        saving = asyncio.create_task(self._save_all(list(self._tasks)))
        # `stop` ends it where it was left.
        self._tasks.add(saving)
        while not saving.done() and self._state.workers.is_connected:
            await asyncio.wait({saving}, timeout=LOOK_EVERY_S)
        if saving.done():
            saving.result()
        else:
            logger.warning("event=not_saved why='the workers are away'")

    async def _save_all(self, running: Sequence[asyncio.Task[None]]) -> None:
        await asyncio.gather(*running, return_exceptions=True)
        for model in self._state.registry.models.values():
            try:
                workers = self._state.workers.current()
                if model.state != "ready" or model.workers != workers.name:
                    continue
                problem = await self._models.save(model, workers)
            except (WorkersLost, JournalError, OSError) as lost:
                logger.warning("event=not_saved model=%s why=%r", model.model_id, str(lost))
                continue
            if problem is not None:
                logger.warning("event=not_saved model=%s why=%r", model.model_id, problem.message)

    async def stop(self) -> None:
        """Stop waiting for running requests: the workers remember their results, and the next start asks for them."""
        tasks = [*self._tasks, *self._elsewhere]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots += 1
        self._left(task)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._elsewhere.discard(task)
        self._state.wake.set()
        stop_if_broken(task)

    async def _run(self, group: Sequence[Ticket]) -> None:
        state = self._state
        if group[0].lane is None and state.inference.can_sample:
            group = self._send_elsewhere(group)
        try:
            # Whoever replaces them meanwhile holds none of what is about to be made sure of.
            workers = state.workers.current()
            async with AsyncExitStack() as until_settled:
                calls = await self._prepare(group, workers, until_settled)
                if calls:
                    started = time.monotonic()
                    ids = [call.ticket.request_id for call in calls]
                    done = await workers.run(Work(ids, [call.operation for call in calls]))
                    await self._settle(calls, done.results, time.monotonic() - started)
        except WorkersLost as problem:
            state.tally.count("workers_lost_total")
            await self._put_back([t for t in group if t.request_id in state.open], str(problem), alone=True)
        except JournalError as problem:
            state.problem = f"nothing can be kept: {problem}"
            logger.error("event=journal_failed why=%r", str(problem))
            await self._put_back([t for t in group if t.request_id in state.open], state.problem, alone=True)
            await asyncio.sleep(RETRY_S)

    def _send_elsewhere(self, group: Sequence[Ticket]) -> list[Ticket]:
        """Give samples to endpoints, for as long as those take, and the place of this group free; returns the rest."""
        for ticket in group:
            request = self._state.open[ticket.request_id]
            if not request.is_for_workers:
                self._start_elsewhere(self._sample_elsewhere(ticket, request))
        return [ticket for ticket in group if self._state.open[ticket.request_id].is_for_workers]

    def _start_elsewhere(self, work: Coroutine[None, None, None]) -> None:
        """What holds no slot: it takes as long as others, or needs a slot itself."""
        task = asyncio.create_task(work)
        self._elsewhere.add(task)
        task.add_done_callback(self._left)

    async def _free(self, call: Call, read: CheckpointInUse) -> None:
        """Save elsewhere who needs a checkpoint, and let the save that is to write over it come again."""
        problem = await checkpoint_queries.save_readers(
            self._state, self._admission, read.checkpoint, besides=read.model
        )
        if problem is None:
            await self._put_back([call.ticket], "nobody needs what it writes over any more", alone=True)
            self._state.wake.set()
        else:
            await self._settle([call], [Failure("server", 503, problem)], 0.0)

    async def _sample_elsewhere(self, ticket: Ticket, request: OpenRequest) -> None:
        state = self._state
        request.is_running = True
        operation = await self._read(ticket)
        if operation is None:
            return
        try:
            assert isinstance(operation, Sample)
            _refuse_cancelled(request)
            operation = self._preflight.with_weights(operation, None)
            request.asking = asyncio.create_task(state.inference.sample(operation, state.workers.max_context_length))
            result = await request.asking
        except asyncio.CancelledError:
            if not request.is_cancelled:
                raise
            result = CANCELLED
        except Exception as problem:  # noqa: BLE001 - the client is told, whatever it was, and the others go on
            result = _failure(request, problem)
        if result is not None:
            await self._settle([Call(ticket, request, operation, None)], [result], 0.0)
            return
        request.is_for_workers, request.is_running = True, False
        state.scheduler.put_back([ticket])
        state.wake.set()

    async def _prepare(
        self, group: Sequence[Ticket], workers: Incarnation, until_settled: AsyncExitStack
    ) -> list[Call]:
        """The requests of a group that can run; ends the others. until_settled: holds the name that a save writes."""
        state, calls = self._state, []
        for ticket in group:
            request = state.open[ticket.request_id]
            request.is_running = True
            operation = await self._read(ticket)
            if operation is None:
                continue
            operation = self._preflight.over_initial(operation)
            model = state.model_of(ticket)
            if not isinstance(operation, RUN_AHEAD) or model is None or model.workers != workers.name:
                # What saves a model, or makes it again, reads what the journal has of it.
                await self._kept(ticket)
            try:
                _refuse_cancelled(request)
                if (checkpoint := saved_as(operation)) is not None:
                    await until_settled.enter_async_context(state.naming(checkpoint))
                await self._begin(request, operation, workers.name)
                operation = await self._preflight.prepare(ticket, operation, workers)
                model = state.model_of(ticket)
                if request.kind == RELEASE and model is not None:
                    await self._release(ticket, model, workers)
                    continue
            except CheckpointInUse as problem:
                self._start_elsewhere(self._free(Call(ticket, request, operation, None), problem))
                continue
            except (WorkersLost, JournalError):
                raise
            except Exception as problem:  # noqa: BLE001 - as in `_sample_elsewhere`
                await self._settle([Call(ticket, request, operation, None)], [_failure(request, problem)], 0.0)
                continue
            call = Call(ticket, request, operation, workers.name)
            if isinstance(operation, UnloadModel) and model is not None and model.workers != workers.name:
                await self._settle([call], [Unloaded(model.model_id)], 0.0)
            else:
                calls.append(call)
        return calls

    async def _read(self, ticket: Ticket) -> Operation | None:
        """What a request asks for; None where the journal has lost it, which ends the request."""
        state = self._state
        try:
            return decode_operation(state.journal.operation(ticket.request_id))
        except Damaged as problem:
            logger.error("event=request_lost request=%s why=%r", ticket.request_id, str(problem))
            await self._kept(ticket)
            message = f"this did not run, since the service's journal is damaged: {problem}. Send it again"
            await state.fail([ticket], Failure("server", 500, message))
            state.scheduler.finish([ticket])
            return None

    async def _begin(self, request: OpenRequest, operation: Operation, workers: str) -> None:
        """Write which workers get a request; if they are not the same as before, those are gone."""
        state = self._state
        request_id, before = request.ticket.request_id, request.begun_by
        if before == workers:
            return
        await self._preflight.check_begin(request, operation, workers)
        request.attempts += before is not None
        request.begun_by = workers
        if request.attempts > state.options.worker_max_retries:
            raise CannotRun(
                Failure(
                    "server",
                    500,
                    f"the workers were lost {request.attempts} times while they ran this request, which is given up; "
                    "its model is as it was before it. See the service's log for what became of them",
                )
            )
        begun = asyncio.ensure_future(state.journal.begin([request_id], workers))
        if saved_as(operation) is not None:
            # What it leaves behind is told from others' by this.
            await begun
            return
        # Others have no need of it but to be counted, so the workers do not wait for the disk.
        self._marks.add(begun)
        begun.add_done_callback(self._marked)

    def _marked(self, mark: asyncio.Future[None]) -> None:
        self._marks.discard(mark)
        if not mark.cancelled() and mark.exception() is not None:
            logger.error("event=journal_failed why=%r", str(mark.exception()))

    async def _settle(self, calls: Sequence[Call], results: Sequence[Result], seconds: float) -> None:
        """End requests. Those that failed together are each tried again alone: the fault may be one client's."""
        state = self._state
        for call in calls:
            await self._kept(call.ticket)
        again = [c for c, r in zip(calls, results, strict=True) if isinstance(r, Failure) and len(calls) > 1]
        ended = [(c, r) for c, r in zip(calls, results, strict=True) if c not in again]
        outcomes = []
        for call, result in ended:
            if isinstance(call.operation, CreateModel) and not isinstance(result, Failure):
                await self._order_initial_checkpoint(call.operation.model_id)
            self._count(call.operation, result)
            outcomes.append(self._effects.of(call.ticket, call.operation, result, call.workers, seconds / len(calls)))
        ahead = [call.ticket for call, result in ended if _runs_ahead(call, result)]
        if outcomes:
            with self._keep(ahead):
                await state.end(outcomes, [result for _, result in ended])
        for call, result in ended:
            if isinstance(call.operation, SaveWeights) and isinstance(result, Saved):
                # Before the model's next request, which may be a save under the name that goes.
                await self._drop_obsolete(call.ticket)
        state.scheduler.finish([call.ticket for call, _ in ended if call.ticket not in ahead])
        await self._put_back([call.ticket for call in again], "it failed beside others", alone=True)
        for call, result in ended:
            await self._follow(call, result)

    @contextmanager
    def _keep(self, tickets: Sequence[Ticket]) -> Iterator[None]:
        """Around the writing of results: meanwhile the next requests of these models can start."""
        kept = asyncio.Event()
        lanes = [ticket.lane for ticket in tickets if ticket.lane is not None]
        self._keeping |= dict.fromkeys(lanes, kept)
        self._state.scheduler.finish(tickets)
        self._state.wake.set()
        try:
            yield
        finally:
            for lane in lanes:
                del self._keeping[lane]
            kept.set()

    async def _kept(self, ticket: Ticket) -> None:
        """Wait until the previous result of this model is in the journal, if the model ran ahead of it."""
        if (kept := self._keeping.get(ticket.lane or "")) is not None:
            await kept.wait()

    async def _put_back(self, tickets: Sequence[Ticket], why: str, *, alone: bool) -> None:
        state = self._state
        gone = [t for t in tickets if t.lane is not None and not state.scheduler.has_lane(t.lane)]
        if state.workers.are_gone:
            gone = list(tickets)
            state.scheduler.finish(gone)
            state.doubt(gone)
        kept = [ticket for ticket in tickets if ticket not in gone]
        for ticket in kept:
            state.open[ticket.request_id].is_running = False
            logger.info("event=run_again request=%s why=%r", ticket.request_id, why)
        state.scheduler.put_back(kept, alone=alone)
        if gone:
            await state.fail(gone, Failure("server", 503, f"this did not run: {why}"))

    async def _follow(self, call: Call, result: Result) -> None:
        """What the service itself does after a request has ended."""
        state, model = self._state, self._state.model_of(call.ticket)
        if model is None:
            return
        if not model.is_there:
            dropped = state.scheduler.close_lane(model.lane) if state.scheduler.has_lane(model.lane) else []
            await state.fail(dropped, Failure("user", 410, f"model {model.model_id} is {model.state}"))
            await self._models.drop_obsolete(model)
            return
        if isinstance(result, SyncResult):
            await state.inference.note_sync(result)
        if isinstance(result, OptimResult) and self._is_synced_after_steps(model):
            await self._admission.submit_own(SyncWeights(model.model_id), AFTER_STEP)
        if isinstance(call.operation, SaveWeights):
            self._saving.discard(model.lane)
        longest = max(MAX_TAIL_S, TAIL_PER_SAVE * model.save_s)
        is_long = model.tail_s > longest or model.tail_bytes > MAX_TAIL_BYTES
        if isinstance(call.operation, OptimStep) and is_long and model.lane not in self._saving:
            self._saving.add(model.lane)
            await self._admission.submit_own(recovery_save(model))

    def _is_synced_after_steps(self, model: ModelRecord) -> bool:
        """Whether endpoints take a model's weights as they are now; those that wait to be sent go with them."""
        state = self._state
        if not state.inference.takes_steps:
            return False
        if any(other is not model and other.state == "ready" for other in state.registry.models.values()):
            logger.info("event=not_synced model=%s why='several models, and an endpoint holds one'", model.model_id)
            return False
        return not any(
            request.kind == AFTER_STEP and request.ticket.lane == model.lane for request in state.open.values()
        )

    async def _release(self, ticket: Ticket, model: ModelRecord, workers: Incarnation) -> None:
        """Take a model whose client is idle off the workers."""
        failure = await self._models.set_aside(model, workers)
        result = Unloaded(model.model_id) if failure is None else failure
        records = self._state.passed(ticket)
        await self._state.end([Outcome(ticket.request_id, encode(result), time.time(), records=records)], [result])
        self._state.scheduler.finish([ticket])

    async def _drop_obsolete(self, ticket: Ticket) -> None:
        model = self._state.model_of(ticket)
        if model is not None:
            await self._models.drop_obsolete(model)

    async def _order_initial_checkpoint(self, model_id: str) -> None:
        if not self._state.options.skip_initial_checkpoint:
            await self._admission.submit_own(SaveWeights(model_id, INITIAL_NAME, overwrite=True))

    def _count(self, operation: Operation, result: Result) -> None:
        if isinstance(result, Failure):
            return
        if isinstance(operation, ForwardBackward):
            self._state.tally.count_tokens(sum(datum.tokens.shape[0] for datum in operation.data))
        elif isinstance(operation, Sample) and isinstance(result, SampleResult):
            self._state.tally.count_tokens(sum(one.tokens.shape[0] for one in result.sequences))
        if (checkpoint := saved_as(operation)) is not None:
            logger.info("event=saved checkpoint=%s", checkpoint.uri("xorl"))


def stop_if_broken(task: asyncio.Task[None]) -> None:
    """End the event loop if a task of the orchestrator raised, so that the process is started again.

    Its requests stay unfinished in the journal, from which the next start takes them up.
    """
    if not task.cancelled() and task.exception() is not None:
        logger.critical("event=orchestrator_broken", exc_info=task.exception())
        asyncio.get_running_loop().stop()


def _failure(request: OpenRequest, problem: Exception) -> Failure:
    """Of a request that cannot run. What nobody foresaw ends it, too: in the journal, it would end each next start."""
    if isinstance(problem, CannotRun):
        return problem.failure
    logger.error("event=not_prepared request=%s kind=%s", request.ticket.request_id, request.kind, exc_info=problem)
    what = f"{type(problem).__name__}: {problem}"
    return Failure("server", 500, f"this did not run, the service failed before it: {what}. See the service's log")


def _refuse_cancelled(request: OpenRequest) -> None:
    if request.is_cancelled:
        raise CannotRun(CANCELLED)


def _runs_ahead(call: Call, result: Result) -> bool:
    """Whether the next request of its model may run while this result is being written to disk.

    Whoever comes after this process finds the result with the workers, under the same id, as they have it in order. A
    failure they do not remember: to try it again after its successor would be another order.
    """
    return isinstance(call.operation, RUN_AHEAD) and not isinstance(result, Failure)
