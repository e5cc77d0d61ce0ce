"""Orchestrator: creates the parts of this package, starts and stops them, and answers the API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from xorl.server.addresses import read_published
from xorl.server.channel import ChannelKeys, ChannelServer, Limits
from xorl.server.endpoint_queries import (
    AddEndpoint,
    ConnectEndpoints,
    DisconnectEndpoints,
    ListEndpoints,
    RemoveEndpoint,
    SetSyncQuantization,
)
from xorl.server.memory import return_freed_memory
from xorl.server.messages import Cancel, Poll, Rejected, Submit, Tombstone, Unreadable
from xorl.server.operations import Failure, Message
from xorl.server.orchestrator import (
    checkpoint_queries,
    deletion,
    served_models,
    service_queries,
    session_search,
    status,
    waiting,
)
from xorl.server.orchestrator.admission import Admission
from xorl.server.orchestrator.commit import JournalError
from xorl.server.orchestrator.housekeeping import Housekeeping
from xorl.server.orchestrator.inference import Inference
from xorl.server.orchestrator.journal import Journal
from xorl.server.orchestrator.options import OrchestratorOptions
from xorl.server.orchestrator.registry import Registry
from xorl.server.orchestrator.runner import Runner, stop_if_broken
from xorl.server.orchestrator.scheduler import Scheduler
from xorl.server.orchestrator.state import State
from xorl.server.orchestrator.workers import Workers
from xorl.server.queries import (
    CreateSamplingSession,
    CreateSession,
    DeleteCheckpoint,
    FindServedModel,
    FinishSession,
    GetModel,
    GetSampler,
    GetService,
    GetSession,
    GetTrainingRun,
    GetWeightsInfo,
    Heartbeat,
    ListCheckpoints,
    ListServedModels,
    ListSessions,
    ListTrainingRuns,
    Request,
    SearchSessions,
    SetCheckpointTtl,
)
from xorl.server.status_queries import GetStatus, GetStorage

logger = logging.getLogger(__name__)

QueryHandler = Callable[[Any], Awaitable[Message]]

QUERIES: dict[type[Message], Callable[[State, Any], Awaitable[Message]]] = {
    Poll: waiting.poll,
    Cancel: waiting.cancel,
    GetService: service_queries.get_service,
    GetStatus: status.get_status,
    GetStorage: status.get_storage,
    CreateSession: service_queries.create_session,
    Heartbeat: service_queries.heartbeat,
    FinishSession: service_queries.finish_session,
    GetSession: service_queries.get_session,
    ListSessions: service_queries.list_sessions,
    SearchSessions: session_search.search_sessions,
    GetModel: service_queries.get_model,
    CreateSamplingSession: service_queries.create_sampling_session,
    GetSampler: service_queries.get_sampler,
    ListServedModels: served_models.list_served_models,
    ListCheckpoints: checkpoint_queries.list_checkpoints,
    DeleteCheckpoint: deletion.delete_checkpoint,
    SetCheckpointTtl: checkpoint_queries.set_ttl,
    GetWeightsInfo: checkpoint_queries.weights_info,
    ListTrainingRuns: checkpoint_queries.list_training_runs,
    GetTrainingRun: checkpoint_queries.get_training_run,
}


class Orchestrator:
    """Answers the API and drives the workers, from `start` to `stop`, in one event loop.

    address: the address on which it listens, once it is started.
    """

    def __init__(self, options: OrchestratorOptions, *, limits: Limits | None = None) -> None:
        self._options = options
        self._limits = limits
        self.address = options.api_address

    async def start(self) -> None:
        """Continue with the requests in the journal, and listen."""
        options = self._options
        keys = None if options.keys is None else ChannelKeys.load(Path(options.keys))
        wake = asyncio.Event()
        journal = Journal(options.journal_path)
        workers = Workers(
            options.worker_address,
            keys=keys,
            find=None if options.workers_file is None else partial(read_published, Path(options.workers_file)),
            limits=self._limits,
            connection_timeout_s=options.worker_connection_timeout_s,
            on_change=wake.set,
        )
        registry = Registry(journal)
        inference = Inference(options, journal, registry)
        self.state = State(options, journal, registry, Scheduler(), workers, inference, {}, wake)
        self._admission = Admission(self.state)
        self._queries: dict[type[Message], QueryHandler] = {
            FindServedModel: partial(served_models.find_served_model, self.state, self._admission),
            AddEndpoint: inference.add,
            RemoveEndpoint: inference.remove,
            ListEndpoints: inference.list_all,
            ConnectEndpoints: inference.connect,
            DisconnectEndpoints: inference.disconnect,
            SetSyncQuantization: inference.set_quantization,
            **{kind: partial(query, self.state) for kind, query in QUERIES.items()},
        }
        stale = self._admission.requeue_unfinished()
        logger.info("event=journal_read requests=%d bytes=%d", len(self.state.open), journal.size_bytes())
        await self.state.fail(stale, Failure("user", 410, "the model was unloaded or recreated before this ran"))
        await deletion.finish_keeping(self.state)
        await checkpoint_queries.adopt(self.state)
        (await workers.start()).add_done_callback(stop_if_broken)
        self._server: ChannelServer[Request] = ChannelServer(
            options.api_address, Request, self.answer, limits=self._limits
        )
        self.address = await self._server.bind()
        self.runner = Runner(self.state, self._admission)
        self.housekeeping = Housekeeping(self.state, self._admission)
        self._tasks = [
            asyncio.create_task(self._server.serve()),
            asyncio.create_task(self.runner.drive()),
            asyncio.create_task(self.housekeeping.run()),
            asyncio.create_task(inference.watch()),
            asyncio.create_task(return_freed_memory()),
        ]
        for task in self._tasks:
            task.add_done_callback(stop_if_broken)

    async def stop(self) -> None:
        """Stop all tasks and close. The next start continues with the unfinished requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # `serve` closes the server, but not if its task was cancelled before it began.
        self._server.close()
        await self.runner.stop()
        await self.state.workers.close()
        await self.state.inference.close()
        self.state.journal.close()

    async def answer(self, request: Request) -> Message:
        """Answer one request of the API."""
        if isinstance(request, Submit):
            return await self._admission.submit(request)
        if isinstance(request, Tombstone):
            return await self._admission.reject(request)
        if isinstance(request, Unreadable):
            return await self._admission.note_unreadable(request)
        try:
            return await self._queries[type(request)](request)
        except JournalError as problem:
            return Rejected(507, f"the change cannot be saved: {problem}; free space on the service's disk")
