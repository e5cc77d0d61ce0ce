"""Dispatches the scheduler's next requests to the workers, and writes their results to the journal."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

from xorl.server.messages import CANCELLED, Operation, Result, Suspended
from xorl.server.operations import (
    Failure,
    ForwardBackward,
    ModelCreated,
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
from xorl.server.orchestrator.admission import Admission
from xorl.server.orchestrator.apply_result import apply_result
from xorl.server.orchestrator.base_use import BaseInUse, wait_for_base
from xorl.server.orchestrator.commit import Damaged, JournalError
from xorl.server.orchestrator.dispatch import RUN_AHEAD, Dispatch, failure_of, refuse_cancelled, runs_ahead, work_of
from xorl.server.orchestrator.eviction import Eviction, recovery_save, save_dependents
from xorl.server.orchestrator.journal import Outcome
from xorl.server.orchestrator.lane import Ticket
from xorl.server.orchestrator.operation_properties import (
    BYTES_PER_TOKEN,
    EVICTION,
    INITIAL_NAME,
    SYNC_AFTER_STEP,
    decode_operation,
    encode,
    saved_as,
)
from xorl.server.orchestrator.preflight import CannotRun, CheckpointInUse, Preflight
from xorl.server.orchestrator.registry import ModelRecord
from xorl.server.orchestrator.state import OpenRequest, State
from xorl.server.orchestrator.workers import POLL_EVERY_S, Incarnation, WorkersLost

logger = logging.getLogger(__name__)

# One group of requests runs while the next is in transit. More slots would make scheduling less fair.
NUM_SLOTS = 2
# How long to wait before retrying after a failed write to the journal.
RETRY_S = 1.0
# The service saves a model when replaying its tail would take the workers longer than this, in seconds ...
MAX_TAIL_S = 600.0
# ... or when the tail's bodies take more disk than this. Saves take at most a thirtieth of the workers' time.
MAX_TAIL_BYTES = 1024**3
TAIL_PER_SAVE = 30.0


class Runner:
    """Runs requests until it is cancelled.

    A result is written to the journal before any client sees it. While it is being written, the model's next request
    may run only if both are gradients or steps (`runs_ahead`). If the workers die, the requests they had are queued
    again, and the models are restored before these run.
    """

    def __init__(self, state: State, admission: Admission) -> None:
        self._state = state
        self._admission = admission
        self._eviction = Eviction(state)
        self._preflight = Preflight(state, self._eviction)
        self._slots = NUM_SLOTS
        self._tasks: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._begin_writes: set[asyncio.Future[None]] = set()
        self._result_writes: dict[str, asyncio.Event] = {}  # by lane: set once its last result is in the journal
        self._saving: set[str] = set()  # lanes with a queued internal save

    async def drive(self) -> None:
        """Start all requests that can run, whenever `State.wake` is set."""
        state = self._state
        while True:
            await state.wake.wait()
            state.wake.clear()
            while self._slots > 0 and state.workers.is_ready and (group := state.scheduler.take(self._max_pass_cost())):
                self._slots -= 1
                task = asyncio.create_task(self._run(group))
                self._tasks.add(task)
                task.add_done_callback(self._on_run_done)

    def _max_pass_cost(self) -> float:
        """The maximum cost of a shared pass: one micro-batch on each rank, as it is never suspended."""
        health = self._state.workers.health
        num_ranks = 1 if health is None else health.world_size
        return float(BYTES_PER_TOKEN * self._state.options.tokens_per_row * num_ranks)

    async def save_models(self) -> None:
        """Before `stop`: start no more requests, wait for running ones, and save the models on the workers.

        The next start then has nothing to replay. If the workers are absent, return at once: the next start runs their
        requests again.
        """
        self._slots = -NUM_SLOTS
        saving = asyncio.create_task(self._save_all(list(self._tasks)))
        # `stop` cancels it if it has not finished.
        self._tasks.add(saving)
        while not saving.done() and self._state.workers.is_connected:
            await asyncio.wait({saving}, timeout=POLL_EVERY_S)
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
                failure = await self._eviction.save_if_changed(model, workers)
            except (WorkersLost, JournalError, OSError) as problem:
                logger.warning("event=not_saved model=%s why=%r", model.model_id, str(problem))
                continue
            if failure is not None:
                logger.warning("event=not_saved model=%s why=%r", model.model_id, failure.message)

    async def stop(self) -> None:
        """Cancel all tasks. The workers remember the results of running requests, and the next start fetches them."""
        tasks = [*self._tasks, *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_run_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots += 1
        self._on_background_done(task)

    def _on_background_done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        self._state.wake.set()
        stop_if_broken(task)

    async def _run(self, group: Sequence[Ticket]) -> None:
        state = self._state
        if group[0].lane is None and state.inference.can_sample:
            group = self._offload_samples(group)
        try:
            # Requests that are prepared for this incarnation must not run on a later one.
            workers = state.workers.current()
            async with AsyncExitStack() as until_settled:
                dispatches = await self._prepare(group, workers, until_settled)
                if dispatches:
                    started = time.monotonic()
                    done = await workers.run(work_of(dispatches))
                    await self._settle_turn(dispatches, done.results, time.monotonic() - started)
        except WorkersLost as problem:
            state.counters.count("workers_lost_total")
            await self._requeue([t for t in group if t.request_id in state.open], str(problem))
        except JournalError as problem:
            state.storage_problem = f"requests cannot be saved: {problem}"
            logger.error("event=journal_failed why=%r", str(problem))
            await self._requeue([t for t in group if t.request_id in state.open], state.storage_problem)
            await asyncio.sleep(RETRY_S)

    def _offload_samples(self, group: Sequence[Ticket]) -> list[Ticket]:
        """Start samples on endpoints, in tasks that hold no slot; returns the samples that need the workers."""
        for ticket in group:
            request = self._state.open[ticket.request_id]
            if not request.needs_workers:
                self._start_in_background(self._sample_on_endpoint(ticket, request))
        return [ticket for ticket in group if self._state.open[ticket.request_id].needs_workers]

    def _start_in_background(self, work: Coroutine[None, None, None]) -> None:
        """Start work that must not hold a slot, since it may take long or wait for a request that needs one."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._on_background_done)

    async def _save_dependents(self, dispatch: Dispatch, conflict: CheckpointInUse) -> None:
        """Move dependents off the checkpoint that a save would overwrite, then retry the save."""
        failure = await save_dependents(self._state, self._admission, conflict.checkpoint, besides=conflict.model)
        await self._retry(dispatch, failure, "no model needs the overwritten checkpoint any more")

    async def _wait_for_base(self, dispatch: Dispatch, owner: ModelRecord) -> None:
        """Wait until the base can be taken from the model that uses it, then retry a request of another model."""
        failure = await wait_for_base(self._state, dispatch.request, owner)
        await self._retry(dispatch, failure, "the base may be free")

    async def _retry(self, dispatch: Dispatch, failure: Failure | None, reason: str) -> None:
        """Requeue a postponed request, or end it with a failure."""
        if failure is None:
            await self._requeue([dispatch.ticket], reason)
            self._state.wake.set()
        else:
            await self._settle([dispatch], [failure], 0.0)

    async def _sample_on_endpoint(self, ticket: Ticket, request: OpenRequest) -> None:
        state = self._state
        request.running_since = time.time()
        operation = await self._load_operation(ticket)
        if operation is None:
            return
        try:
            assert isinstance(operation, Sample)
            refuse_cancelled(request, None)
            operation = self._preflight.resolve_sampler(operation)
            sampling = state.inference.sample(operation, state.workers.max_context_length)
            request.endpoint_task = asyncio.create_task(sampling)
            result = await request.endpoint_task
        except asyncio.CancelledError:
            if not request.is_cancelled:
                raise
            result = CANCELLED
        except Exception as problem:  # noqa: BLE001 - any error becomes this request's result; the others continue
            result = failure_of(request, problem)
        if result is not None:
            await self._settle([Dispatch(ticket, request, operation, None)], [result], 0.0)
            return
        request.needs_workers, request.running_since = True, None
        state.scheduler.requeue([ticket])
        state.wake.set()

    async def _prepare(
        self, group: Sequence[Ticket], workers: Incarnation, until_settled: AsyncExitStack
    ) -> list[Dispatch]:
        """Prepare the requests of a group; returns those to send to the workers and ends the others.

        until_settled: receives the locks on checkpoints that the requests write, and the reads of those that they read.
        """
        state, dispatches = self._state, []
        for ticket in group:
            request = state.open[ticket.request_id]
            request.running_since = request.running_since or time.time()
            resumed, request.suspended = request.suspended, None
            if resumed is not None and resumed.workers == workers.name:
                dispatches.append(Dispatch(ticket, request, resumed.operation, workers.name, resumed))
                continue
            operation = await self._load_operation(ticket)
            if operation is None:
                continue
            operation = self._preflight.allow_initial_overwrite(operation)
            model = state.model_of(ticket)
            if not isinstance(operation, RUN_AHEAD) or model is None or model.workers != workers.name:
                # Saving or restoring a model reads its tail from the journal.
                await self._wait_result_written(ticket)
            try:
                refuse_cancelled(request, workers.name)
                if (checkpoint := saved_as(operation)) is not None:
                    await until_settled.enter_async_context(state.checkpoint_lock(checkpoint))
                await self._mark_begun(request, operation, workers.name, was_suspended=resumed is not None)
                operation = await self._preflight.prepare(ticket, operation, workers, until_settled)
                model = state.model_of(ticket)
                if request.kind == EVICTION and model is not None:
                    await self._evict(ticket, model, workers)
                    continue
            except CheckpointInUse as conflict:
                dispatch = Dispatch(ticket, request, operation, None)
                self._start_in_background(self._save_dependents(dispatch, conflict))
                continue
            except BaseInUse as conflict:
                dispatch = Dispatch(ticket, request, operation, None)
                self._start_in_background(self._wait_for_base(dispatch, conflict.owner))
                continue
            except (WorkersLost, JournalError):
                raise
            except Exception as problem:  # noqa: BLE001 - as in `_sample_on_endpoint`
                await self._settle([Dispatch(ticket, request, operation, None)], [failure_of(request, problem)], 0.0)
                continue
            dispatch = Dispatch(ticket, request, operation, workers.name)
            if isinstance(operation, UnloadModel) and model is not None and model.workers != workers.name:
                # The workers do not hold the model.
                await self._settle([dispatch], [Unloaded(model.model_id)], 0.0)
            else:
                dispatches.append(dispatch)
        return dispatches

    async def _load_operation(self, ticket: Ticket) -> Operation | None:
        """Read a request's operation from the journal. If it is damaged, end the request and return None."""
        state = self._state
        try:
            return decode_operation(state.journal.operation(ticket.request_id))
        except Damaged as problem:
            logger.error("event=request_lost request=%s why=%r", ticket.request_id, str(problem))
            await self._wait_result_written(ticket)
            message = f"this did not run, since the service's journal is damaged: {problem}. Send it again"
            await state.fail([ticket], Failure("server", 500, message))
            state.scheduler.finish([ticket])
            return None

    async def _mark_begun(
        self, request: OpenRequest, operation: Operation, workers: str, *, was_suspended: bool
    ) -> None:
        """Record the incarnation that gets a request. If it differs from the last one, that one is gone."""
        state = self._state
        request_id, before = request.ticket.request_id, request.begun_by
        if before == workers:
            return
        await self._preflight.check_name(request, operation, workers)
        # A suspended request was not running when the workers died.
        request.attempts += before is not None and not was_suspended
        request.begun_by = workers
        if request.attempts > state.options.worker_max_retries:
            raise CannotRun(
                Failure(
                    "server",
                    500,
                    f"the workers were lost {request.attempts} times while they ran this request, so it is given up; "
                    "its model is as it was before the request. See the service's log for why the workers died",
                )
            )
        write = asyncio.ensure_future(state.journal.begin([request_id], workers))
        if saved_as(operation) is not None:
            # `check_name` relies on this to tell a checkpoint of this request from an existing one.
            await write
            return
        # For other operations it only counts attempts, so the workers need not wait for the disk.
        self._begin_writes.add(write)
        write.add_done_callback(self._on_begin_written)

    def _on_begin_written(self, write: asyncio.Future[None]) -> None:
        self._begin_writes.discard(write)
        if not write.cancelled() and write.exception() is not None:
            logger.error("event=journal_failed why=%r", str(write.exception()))

    async def _settle_turn(self, dispatches: Sequence[Dispatch], results: Sequence[Result], seconds: float) -> None:
        """End the requests of one turn of the workers; requeue those that the workers have suspended."""
        state, share_s = self._state, seconds / len(dispatches)
        pairs = list(zip(dispatches, results, strict=True))
        for dispatch, result in pairs:
            ticket, request = dispatch.ticket, dispatch.request
            if not isinstance(result, Suspended):
                continue
            if ticket.lane is not None and not state.scheduler.has_lane(ticket.lane):
                await self._requeue([ticket], "its model was recreated")
                continue
            request.suspended, request.needs_workers = dispatch.suspended(share_s), True
            state.scheduler.suspend(ticket, 1 - result.done, alone=ticket.lane is not None)
        ended = [(dispatch, result) for dispatch, result in pairs if not isinstance(result, Suspended)]
        state.wake.set()
        if ended:
            chosen, found = [dispatch for dispatch, _ in ended], [result for _, result in ended]
            await self._settle(chosen, found, share_s * len(ended), is_shared=len(dispatches) > 1)

    async def _settle(
        self, dispatches: Sequence[Dispatch], results: Sequence[Result], seconds: float, *, is_shared: bool = False
    ) -> None:
        """End requests. If requests failed in a shared pass, retry each alone, since a single one may be the cause."""
        state = self._state
        for dispatch in dispatches:
            await self._wait_result_written(dispatch.ticket)
        pairs = list(zip(dispatches, results, strict=True))
        retried = [d for d, result in pairs if isinstance(result, Failure) and is_shared]
        ended = [(d, result) for d, result in pairs if d not in retried]
        outcomes = []
        for dispatch, result in ended:
            ticket, operation = dispatch.ticket, dispatch.operation
            if isinstance(result, ModelCreated) and not state.options.skip_initial_checkpoint:
                await self._admission.submit_internal(SaveWeights(result.model_id, INITIAL_NAME, overwrite=True))
            self._count(dispatch, result)
            duration_s = dispatch.total_seconds(seconds / len(dispatches))
            outcomes.append(apply_result(state, ticket, operation, result, dispatch.workers, duration_s))
        ahead = [dispatch.ticket for dispatch, result in ended if runs_ahead(dispatch, result)]
        if outcomes:
            with self._run_ahead_of_write(ahead):
                await state.end(outcomes, [result for _, result in ended])
        for dispatch, result in ended:
            model = state.model_of(dispatch.ticket)
            if isinstance(dispatch.operation, SaveWeights) and isinstance(result, Saved) and model is not None:
                # Before the model's next request, which may be a save under the name that is deleted.
                await self._eviction.delete_obsolete(model)
        state.scheduler.finish([dispatch.ticket for dispatch, _ in ended if dispatch.ticket not in ahead])
        await self._requeue([dispatch.ticket for dispatch in retried], "it failed in a shared pass")
        for dispatch, result in ended:
            await self._follow_up(dispatch, result)

    @contextmanager
    def _run_ahead_of_write(self, tickets: Sequence[Ticket]) -> Iterator[None]:
        """While results are being written in the body, let the next requests of these tickets' models start."""
        written = asyncio.Event()
        lanes = [ticket.lane for ticket in tickets if ticket.lane is not None]
        self._result_writes |= dict.fromkeys(lanes, written)
        self._state.scheduler.finish(tickets)
        self._state.wake.set()
        try:
            yield
        finally:
            for lane in lanes:
                del self._result_writes[lane]
            written.set()

    async def _wait_result_written(self, ticket: Ticket) -> None:
        """Wait until the previous result of the ticket's model is in the journal."""
        if (written := self._result_writes.get(ticket.lane or "")) is not None:
            await written.wait()

    async def _requeue(self, tickets: Sequence[Ticket], reason: str) -> None:
        """Queue requests again, each to run alone, or fail them if their model or the workers are gone."""
        state = self._state
        failed = [t for t in tickets if t.lane is not None and not state.scheduler.has_lane(t.lane)]
        if state.workers.absent_too_long:
            failed = list(tickets)
            state.scheduler.finish(failed)
            state.invalidate_models(failed)
        requeued = [ticket for ticket in tickets if ticket not in failed]
        for ticket in requeued:
            state.open[ticket.request_id].running_since = None
            logger.info("event=run_again request=%s why=%r", ticket.request_id, reason)
        state.scheduler.requeue(requeued, alone=True)
        if failed:
            await state.fail(failed, Failure("server", 503, f"this did not run: {reason}"))

    async def _follow_up(self, dispatch: Dispatch, result: Result) -> None:
        """Submit the internal requests that follow a request: a weight sync or a recovery save."""
        state, model = self._state, self._state.model_of(dispatch.ticket)
        if model is None:
            return
        if not model.exists:
            dropped = state.scheduler.close_lane(model.lane) if state.scheduler.has_lane(model.lane) else []
            await state.fail(dropped, Failure("user", 410, f"model {model.model_id} is {model.state}"))
            await self._eviction.delete_obsolete(model)
            return
        if isinstance(result, SyncResult):
            await state.inference.note_sync(result)
        if isinstance(result, OptimResult) and self._needs_sync_after_step(model):
            await self._admission.submit_internal(SyncWeights(model.model_id), SYNC_AFTER_STEP)
        if isinstance(dispatch.operation, SaveWeights):
            self._saving.discard(model.lane)
        max_tail_s = max(MAX_TAIL_S, TAIL_PER_SAVE * model.save_s)
        is_long = model.tail_s > max_tail_s or model.tail_bytes > MAX_TAIL_BYTES
        if isinstance(dispatch.operation, OptimStep) and is_long and model.lane not in self._saving:
            self._saving.add(model.lane)
            await self._admission.submit_internal(recovery_save(model))

    def _needs_sync_after_step(self, model: ModelRecord) -> bool:
        """Whether to queue a sync of a model's weights to endpoints; a sync that is already queued includes them."""
        state = self._state
        if not state.inference.syncs_after_steps:
            return False
        if any(other is not model and other.state == "ready" for other in state.registry.models.values()):
            logger.info("event=not_synced model=%s why='several models, and an endpoint holds one'", model.model_id)
            return False
        return not any(
            request.kind == SYNC_AFTER_STEP and request.ticket.lane == model.lane for request in state.open.values()
        )

    async def _evict(self, ticket: Ticket, model: ModelRecord, workers: Incarnation) -> None:
        """Run an internal request that evicts an idle model."""
        failure = await self._eviction.evict(model, workers)
        result = Unloaded(model.model_id) if failure is None else failure
        records = self._state.leave_order(ticket)
        await self._state.end([Outcome(ticket.request_id, encode(result), time.time(), records=records)], [result])
        self._state.scheduler.finish([ticket])

    def _count(self, dispatch: Dispatch, result: Result) -> None:
        ticket, operation = dispatch.ticket, dispatch.operation
        if isinstance(result, Failure):
            return
        if ticket.lane is not None:
            self._state.progress.note(ticket.lane, operation, result)
        if isinstance(operation, ForwardBackward):
            self._state.counters.count_tokens(dispatch.num_tokens)
        elif isinstance(operation, Sample) and isinstance(result, SampleResult):
            self._state.counters.count_tokens(sum(one.tokens.shape[0] for one in result.sequences))
        if (checkpoint := saved_as(operation)) is not None:
            logger.info("event=saved checkpoint=%s", checkpoint.uri("xorl"))


def stop_if_broken(task: asyncio.Task[None]) -> None:
    """Stop the event loop if a task of the orchestrator raised, so that the launcher restarts the process.

    Unfinished requests stay in the journal, and the next start continues with them.
    """
    if not task.cancelled() and task.exception() is not None:
        logger.critical("event=orchestrator_broken", exc_info=task.exception())
        asyncio.get_running_loop().stop()
