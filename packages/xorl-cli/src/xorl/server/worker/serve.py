"""The worker's loop: rank 0 receives work and broadcasts it, all ranks run it, rank 0 answers."""

from __future__ import annotations

import logging
from collections import OrderedDict
from functools import partial

import msgspec

from xorl.core.runtime import GarbageCollection
from xorl.server.channel import BlockingServer, Received
from xorl.server.collectives import broadcast_bytes
from xorl.server.messages import CANCELLED, Cancel, Done, Ok, Operation, Result, ShutdownResult, Suspended, Work
from xorl.server.operations import Failure, ForwardBackward, Saved
from xorl.server.worker.interrupts import Interrupts
from xorl.server.worker.saved_models import PendingSave
from xorl.server.worker.watch import IDLE_S
from xorl.server.worker.worker import Worker, failure_of

logger = logging.getLogger(__name__)

MAX_RESULTS, MAX_RESULT_BYTES = 512, 512 * 2**20
# Far more than the number of samples that can be in flight at once.
MAX_CANCELLED = 4096

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Work).decode


class ResultCache:
    """The results of the last successful operations by id, in case the orchestrator sends an operation again."""

    def __init__(self, *, max_results: int = MAX_RESULTS, max_bytes: int = MAX_RESULT_BYTES) -> None:
        self._max_results = max_results
        self._max_bytes = max_bytes
        self._results: OrderedDict[str, tuple[Result, int]] = OrderedDict()
        self._num_bytes = 0

    def add(self, operation_id: str, result: Result) -> None:
        """Add a result and evict the oldest if there are too many. Failures are not cached: they may be retried."""
        if isinstance(result, Failure | Suspended):
            return
        size = len(_encode(result))
        self._results[operation_id] = (result, size)
        self._num_bytes += size
        while len(self._results) > 1 and (len(self._results) > self._max_results or self._num_bytes > self._max_bytes):
            _, (_, evicted) = self._results.popitem(last=False)
            self._num_bytes -= evicted

    def get(self, operation_id: str) -> Result | None:
        """The result if it is cached."""
        found = self._results.get(operation_id)
        return None if found is None else found[0]


class CancelledIds:
    """The ids of the operations that were cancelled last, including ones that have not arrived or have finished.

    The channel's thread adds ids while the worker's thread checks them.
    """

    def __init__(self, *, max_ids: int = MAX_CANCELLED) -> None:
        self._max_ids = max_ids
        self._ids: dict[str, None] = {}

    def intercept(self, message: Work | Cancel) -> Ok | None:
        """The answer to a Cancel; None for Work, which is queued."""
        if isinstance(message, Work):
            return None
        self._ids[message.request_id] = None
        if len(self._ids) > self._max_ids:
            del self._ids[next(iter(self._ids))]
        return Ok()

    def __contains__(self, operation_id: object) -> bool:
        return operation_id in self._ids


def lead(
    worker: Worker, server: BlockingServer[Work | Cancel], cancelled: CancelledIds, *, idle_s: float = IDLE_S
) -> None:
    """Run rank 0 until it is asked to shut down; collective with `follow`. cancelled: intercepts Cancel messages."""
    results = ResultCache()
    with _garbage(worker) as garbage:
        number = 0
        while True:
            worker.base.position.move("idle")
            received = server.receive(idle_s)
            if received is None:
                broadcast_bytes(b"")
                continue
            assert isinstance(received.message, Work), "`cancelled` intercepts Cancel"
            interrupts = Interrupts(cancelled, lambda: server.has_waiting)
            done = _run_missing(worker, received.message, results, interrupts)
            if isinstance(done, PendingSave):
                done.when_done(partial(_reply_to_save, received))
            else:
                received.reply(done)
            number += 1
            garbage.step(number)
            if isinstance(done, Done) and isinstance(done.results[0], ShutdownResult):
                return


def follow(worker: Worker) -> None:
    """Run another rank: do the same as rank 0 until it shuts down."""
    with _garbage(worker) as garbage:
        number = 0
        while True:
            worker.base.position.move("idle")
            body = broadcast_bytes(None)
            if not body:
                continue
            results = worker.run(_decode(body))
            number += 1
            garbage.step(number)
            if isinstance(results[0], ShutdownResult):
                return


def _reply_to_save(received: Received[Work | Cancel], ended: Saved | Exception) -> None:
    """Answer a save that was written in the background. If it is sent again, the checkpoint itself tells."""
    assert isinstance(received.message, Work), "only Work saves"
    result = failure_of(ended) if isinstance(ended, Exception) else ended
    received.reply(Done(received.message.ids, [result]))


def _run_missing(worker: Worker, work: Work, results: ResultCache, interrupts: Interrupts) -> Done | PendingSave:
    """Run the operations whose results are not cached, and answer with all results.

    A save in the background is the only operation of its work.
    """
    found: dict[str, Result] = {}
    for operation_id, operation in zip(work.ids, work.operations, strict=True):
        cached = results.get(operation_id)
        if cached is not None:
            found[operation_id] = cached
        elif _ends_unbegun(worker, operation_id, operation, interrupts):
            found[operation_id] = CANCELLED
    missing = [index for index, operation_id in enumerate(work.ids) if operation_id not in found]
    if missing:
        ids = [work.ids[index] for index in missing]
        rest = Work(ids, [work.operations[index] for index in missing], work.may_suspend)
        broadcast_bytes(_encode(rest))
        ran = worker.run(rest, interrupts)
        if isinstance(ran[0], PendingSave):
            return ran[0]
        for operation_id, result in zip(ids, ran, strict=True):
            assert not isinstance(result, PendingSave), "a save in the background is the only operation of its work"
            found[operation_id] = result
            results.add(operation_id, result)
    else:
        logger.info("event=answered_again ids=%s", ",".join(work.ids))
    return Done(work.ids, [found[operation_id] for operation_id in work.ids])


def _ends_unbegun(worker: Worker, operation_id: str, operation: Operation, interrupts: Interrupts) -> bool:
    """Whether a pass was cancelled before it began."""
    is_pass = isinstance(operation, ForwardBackward) and not worker.is_suspended(operation_id)
    return is_pass and operation_id in interrupts.cancelled


def _garbage(worker: Worker) -> GarbageCollection:
    train = worker.base.local.train
    return GarbageCollection(train.gc_steps, train.empty_cache_steps)
