"""Admits new requests: checks them, writes them to the journal and queues them. Also records refused seq_ids."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time

from msgspec.structs import replace

from xorl.server.identifiers import CheckpointRef, base_refusal, seed_of
from xorl.server.messages import Accepted, Ok, Rejected, Submit, Tombstone, Unreadable
from xorl.server.operations import (
    CheckpointSampler,
    CreateModel,
    Failure,
    LoadWeights,
    LoraSpec,
    ModelCreated,
    ModelOperation,
    Sample,
    SaveWeightsForSampler,
    SessionSampler,
)
from xorl.server.orchestrator.commit import JournalError
from xorl.server.orchestrator.journal import Submission, Written
from xorl.server.orchestrator.lane import Ticket
from xorl.server.orchestrator.operation_properties import (
    INTERNAL_PREFIX,
    RECOVERY_PREFIX,
    RESERVED_PREFIXES,
    UNNAMED_PREFIX,
    cost_of,
    decode_result,
    encode,
    saved_as,
    share_of,
)
from xorl.server.orchestrator.registry import ModelRecord, model_of_lane, stored
from xorl.server.orchestrator.service_queries import session_limit_refusal
from xorl.server.orchestrator.state import State
from xorl.server.orchestrator.unnamed import note_use
from xorl.server.orchestrator.unreadable import UnreadableRequests
from xorl.server.status_queries import ErrorSeen

logger = logging.getLogger(__name__)


class Refused(Exception):
    """A refused request; `rejected` is the answer, with the HTTP status and the remedy."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.rejected = Rejected(status, message)


class Admission:
    """Admits requests. Each is written to the journal before it is accepted, and then queued in the scheduler."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._creating = asyncio.Lock()
        self._unreadable = UnreadableRequests(state.scheduler, state.options.gap_timeout_s)

    def requeue_unfinished(self) -> list[Ticket]:
        """Queue the journal's unfinished requests; returns those that can no longer run."""
        state, stale = self._state, []
        for model in state.registry.models.values():
            if model.exists:
                state.scheduler.open_lane(model.lane, model.next_seq)
        for lane, seq in state.journal.tombstones():
            if state.scheduler.has_lane(lane):
                state.scheduler.reject(lane, seq)
        for r in state.journal.unfinished():
            ticket = Ticket(r.request_id, r.lane, r.seq, r.client, r.share, r.cost, r.number, r.size)
            if _can_run(state, ticket):
                state.admit(ticket, r.kind, attempts=r.attempts, begun_by=r.begun_by)
            else:
                stale.append(ticket)
        return stale

    async def submit(self, submit: Submit) -> Accepted | Rejected:
        """Accept a request durably. For a retry, answer with the id of the first request."""
        try:
            return await self._submit(submit)
        except Refused as refused:
            return refused.rejected
        except JournalError as problem:
            message = f"the request cannot be saved: {problem}; free space on the service's disk"
            model_id = submit.operation.model_id if isinstance(submit.operation, ModelOperation) else None
            self._state.counters.errors.append(
                ErrorSeen(time.time(), model_id, type(submit.operation).__name__, message)
            )
            if model_id is not None and submit.seq_id is not None:
                self._note_unsaved(model_id, submit.seq_id)
            return Rejected(507, message)

    async def submit_internal(
        self, operation: ModelOperation, kind: str | None = None, *, request_id: str | None = None
    ) -> str | None:
        """Queue an internal request behind those of its model; returns None if the journal cannot be written."""
        model = self._state.registry.models[operation.model_id]
        request_id = request_id or f"{INTERNAL_PREFIX}{secrets.token_hex(8)}"
        try:
            await self._journal_and_queue(_submission(request_id, operation, model.client, model.lane, kind=kind))
        except JournalError as problem:
            logger.error("event=not_ordered operation=%s why=%r", type(operation).__name__, str(problem))
            return None
        return request_id

    async def reject(self, tombstone: Tombstone) -> Ok | Rejected:
        """Record that the API refused a request, so that the later requests of its model do not wait for it."""
        state = self._state
        model = state.registry.models.get(tombstone.model_id)
        if model is None or not model.exists or not state.scheduler.admits(model.lane, tombstone.seq_id):
            return Ok()
        try:
            await state.journal.reject(model.lane, tombstone.seq_id)
        except JournalError as problem:
            self._note_unsaved(tombstone.model_id, tombstone.seq_id)
            return Rejected(507, f"the refusal cannot be saved: {problem}; free space on the service's disk")
        if state.scheduler.has_lane(model.lane):
            state.scheduler.reject(model.lane, tombstone.seq_id)
            state.wake.set()
        return Ok()

    def _note_unsaved(self, model_id: str, seq_id: int) -> None:
        """Remember a number that was refused because the journal cannot be written, to skip it there later."""
        model = self._state.registry.models.get(model_id)
        if model is not None and model.exists:
            self._state.unsaved[model.lane, seq_id] = time.monotonic()

    async def note_unreadable(self, unreadable: Unreadable) -> Ok | Rejected:
        """Record that the API refused a request whose model and number it could not read."""
        self._unreadable.note(unreadable.source)
        return await self._skip_unreadable(unreadable.source)

    async def _skip_unreadable(self, source: str) -> Ok | Rejected:
        """Skip the numbers of this source's unreadable requests, if they can be inferred by now."""
        lane, numbers = self._unreadable.missing_numbers(source)
        for seq in numbers:
            logger.info("event=unreadable_skipped lane=%s seq=%d", lane, seq)
            answer = await self.reject(Tombstone(model_of_lane(lane), seq))
            if isinstance(answer, Rejected):
                return answer
        return Ok()

    async def _submit(self, submit: Submit) -> Accepted:
        state, operation = self._state, submit.operation
        if isinstance(operation, CreateModel):
            # One at a time, so that a retry finds the first request in the journal.
            async with self._creating:
                return await self._create(operation, submit)
        found = self._find(submit)
        if found is not None:
            return _accepted(found, submit.key)
        self._check_workers()
        if isinstance(operation, Sample):
            self._check_queue()
            client = self._sampling_client(operation, submit)
            self._check_share(client)
            return await self._journal_and_queue(_submission(submit.request_id, operation, client, None, submit=submit))
        model = self._model(operation)
        model.last_active = time.time()
        if not state.scheduler.fills_gap(model.lane, submit.seq_id):
            # Requests that wait for this number keep their places until it runs.
            self._check_queue()
            self._check_share(model.client)
        if not state.scheduler.admits(model.lane, submit.seq_id):
            raise Refused(
                400,
                f"request {submit.seq_id} of model {model.model_id} was already accepted or skipped; the next number "
                f"is {state.scheduler.next_seq(model.lane)}",
            )
        if isinstance(operation, SaveWeightsForSampler) and operation.name is None:
            operation = replace(operation, name=f"{UNNAMED_PREFIX}{submit.request_id}")
        elif (checkpoint := saved_as(operation)) is not None and checkpoint.name.startswith(RESERVED_PREFIXES):
            if submit.seq_id is not None:
                await self.reject(Tombstone(model.model_id, submit.seq_id))
            prefixes = " or ".join(RESERVED_PREFIXES)
            raise Refused(400, f"names that begin with {prefixes} are reserved for the service; choose another")
        elif isinstance(operation, LoadWeights) and _is_hidden(operation.checkpoint):
            if submit.seq_id is not None:
                await self.reject(Tombstone(model.model_id, submit.seq_id))
            raise Refused(404, f"there is no checkpoint {operation.checkpoint.uri('xorl')}")
        submission = _submission(submit.request_id, operation, model.client, model.lane, submit=submit)
        return await self._journal_and_queue(submission, submit.source)

    def _check_queue(self) -> None:
        """Raise Refused if the queue is full."""
        state = self._state
        if len(state.scheduler) >= state.options.max_queued:
            raise Refused(429, f"{len(state.scheduler)} requests are waiting, which is the limit: try again later")
        if state.scheduler.num_bytes >= state.options.max_queued_bytes:
            raise Refused(429, "the bodies of waiting requests take max_queued_mb, the limit: try again later")

    def _check_workers(self) -> None:
        """Raise Refused if the workers have been away for too long."""
        state = self._state
        if state.workers.absent_too_long:
            absence = f"{state.workers.timeout_s:g} s"
            raise Refused(503, f"the workers have been away for more than {absence}: see the service's log")

    def _check_share(self, client: str) -> None:
        """Raise Refused if a client's queued requests fill its share of the queue, so that there is room for others."""
        options, (count, size) = self._state.options, self._state.scheduler.load_of(client)
        share = options.max_client_share
        if count >= share * options.max_queued or size >= share * options.max_queued_bytes:
            raise Refused(
                429,
                f"{count} requests of this client are waiting, with {size / 10**6:.0f} MB of bodies; one client may "
                f"take {share:.0%} of max_queued_requests and of max_queued_mb: try again when some have been computed",
            )

    async def _journal_and_queue(self, submission: Submission, source: str = "") -> Accepted:
        state, s = self._state, submission
        written = await state.journal.submit(submission)
        if written.number is None:
            return _accepted(written, s.key)
        ticket = Ticket(s.request_id, s.lane, s.seq, s.client, s.share, s.cost, written.number, len(s.body), source)
        state.counters.count("requests_total", operation=s.kind)
        if _can_run(state, ticket):
            state.admit(ticket, s.kind)
            await self._skip_unreadable(source)
        else:
            # While it was written, its model was unloaded or its number was skipped.
            await state.fail([ticket], Failure("user", 410, "the model was unloaded, or the request came too late"))
        return Accepted(written.request_id)

    def _find(self, submit: Submit) -> Written | None:
        """The first request, if this one is a retry; else None."""
        return None if submit.key is None else self._state.journal.find_key(submit.key, submit.body_hash)

    async def _create(self, operation: CreateModel, submit: Submit) -> Accepted:
        state = self._state
        old = state.registry.models.get(operation.model_id)
        found = self._find(submit)
        if found is not None and self._is_retry(submit, old, found):
            return _accepted(found, submit.key)
        self._check_queue()
        self._check_workers()
        self._check_creation(operation, submit, old)
        generation = 1 if old is None else old.generation + 1
        create = self._fill_defaults(operation)
        now = time.time()
        model = ModelRecord(create.model_id, submit.session_id, generation, create, now, now)
        # The workers may be creating the old one at this moment.
        model.replaces = old is not None and (old.workers is not None or old.replaces or old.state == "creating")
        if old is not None and old.exists and old.session_id != submit.session_id:
            # Two clients that use the same name look the same as one client that starts over.
            logger.warning("event=replaced model=%s session=%s", model.model_id, old.session_id)
        submission = _submission(submit.request_id, create, model.client, model.lane, submit=submit)
        ends_lane = None if old is None else old.lane
        submission = dataclasses.replace(submission, records=[stored(model)], ends_lane=ends_lane)
        dropped = state.scheduler.close_lane(old.lane) if old is not None and old.exists else []
        state.registry.models[model.model_id] = model
        state.scheduler.open_lane(model.lane)
        try:
            answer = await self._journal_and_queue(submission)
        except JournalError:
            del state.registry.models[model.model_id]
            state.scheduler.close_lane(model.lane)
            if old is not None:
                state.registry.models[model.model_id] = old
                if old.exists:
                    state.scheduler.open_lane(old.lane, old.next_seq)
            await state.fail(dropped, Failure("server", 507, "the journal's disk is full"))
            raise
        if dropped:
            await state.fail(dropped, Failure("user", 410, f"model {model.model_id} was recreated"))
        return answer

    def _is_retry(self, submit: Submit, old: ModelRecord | None, found: Written) -> bool:
        """Whether a creation is a retry of the request that was found, rather than a new creation.

        It is a new creation if the earlier one failed; without a session, also once the model has been used.
        """
        if old is not None and old.state == "failed":
            return False
        if submit.session_id is not None:
            return True
        state = self._state
        if not found.is_same or old is None or not old.exists or not state.scheduler.is_pristine(old.lane):
            return False
        created = state.journal.find(found.request_id)
        if created is None or not created.is_finished:
            return created is not None
        # Requests without numbers also count as use: gradients are in the tail, and steps change num_steps.
        result = None if created.result is None else decode_result(created.result)
        is_unchanged = isinstance(result, ModelCreated) and old.num_steps == result.num_steps
        return is_unchanged and not state.journal.tail(old.lane)

    def _check_creation(self, operation: CreateModel, submit: Submit, old: ModelRecord | None) -> None:
        state, options = self._state, self._state.options
        if operation.checkpoint is not None and _is_hidden(operation.checkpoint):
            raise Refused(404, f"there is no checkpoint {operation.checkpoint.uri('xorl')}")
        if (refusal := base_refusal(operation.base_model, options.base_names, "trains")) is not None:
            raise Refused(400, refusal)
        if submit.session_id is not None and submit.session_id not in state.registry.sessions:
            raise Refused(404, f"there is no session {submit.session_id}")
        exists = old is not None and old.exists
        if exists and submit.session_id is not None:
            raise Refused(400, f"model {operation.model_id} was already created by another request")
        if not exists and submit.session_id is None and (refusal := session_limit_refusal(state)) is not None:
            raise Refused(429, refusal)

    def _fill_defaults(self, operation: CreateModel) -> CreateModel:
        """The operation with all defaults filled in, so that running it again creates the same model."""
        options = self._state.options
        if not options.enable_lora:
            return replace(operation, lora=None)
        if operation.lora is None and operation.checkpoint is not None:
            return operation
        lora = operation.lora or LoraSpec()
        seed = seed_of(operation.model_id, options.seed) if lora.seed is None else lora.seed
        return replace(operation, lora=replace(lora, seed=seed))

    def _model(self, operation: ModelOperation) -> ModelRecord:
        model = self._state.registry.models.get(operation.model_id)
        if model is None or not model.exists:
            reason = "" if model is None else f": it is {model.state}"
            if model is not None and self._state.registry.is_finished(model):
                reason += ", since its session is finished; its checkpoints are kept"
            raise Refused(404, f"there is no model {operation.model_id}{reason}; create it first")
        return model

    def _sampling_client(self, operation: Sample, submit: Submit) -> str:
        """The client under which the scheduler accounts for a sample. Raises Refused if the sample is too long."""
        max_tokens, limit = operation.max_tokens or 0, self._state.workers.max_context_length
        if limit is not None and max_tokens > limit:
            # The scheduler would charge the client for tokens that cannot be sampled.
            raise Refused(400, f"max_tokens: {max_tokens} is more than the {limit} that the model has positions for")
        if isinstance(operation.sampler, SessionSampler):
            name = operation.sampler.sampling_session_id
            sampler = self._state.registry.samplers.get(name)
            if sampler is None:
                raise Refused(404, f"there is no sampling session {name}")
            if sampler.checkpoint is not None:
                note_use(self._state.registry, sampler.checkpoint, time.time())
            return sampler.session_id or name
        if isinstance(operation.sampler, CheckpointSampler):
            note_use(self._state.registry, operation.sampler.checkpoint, time.time())
        return submit.session_id or "samples"


def _is_hidden(checkpoint: CheckpointRef) -> bool:
    """Whether only the service itself may read a checkpoint."""
    return checkpoint.name.startswith(RECOVERY_PREFIX)


def _submission(
    request_id: str,
    operation: ModelOperation | Sample,
    client: str,
    lane: str | None,
    *,
    kind: str | None = None,
    submit: Submit | None = None,
) -> Submission:
    body = encode(operation)
    return Submission(
        request_id=request_id,
        key=submit.key if submit else None,
        body_hash=submit.body_hash if submit else b"",
        lane=lane,
        # A creation precedes all numbered requests of its model, and samples run in any order.
        seq=submit.seq_id if submit and not isinstance(operation, CreateModel | Sample) else None,
        client=client,
        dialect=submit.dialect if submit else "xorl",
        kind=kind or type(operation).__name__,
        share=share_of(operation),
        cost=cost_of(operation, len(body)),
        body=body,
    )


def _can_run(state: State, ticket: Ticket) -> bool:
    if ticket.lane is None:
        return True
    return state.scheduler.has_lane(ticket.lane) and state.scheduler.admits(ticket.lane, ticket.seq)


def _accepted(written: Written, key: str | None) -> Accepted:
    if not written.is_same:
        raise Refused(
            400, f"{key} was sent before with other content: use a new number; a retry must send the same content"
        )
    return Accepted(written.request_id)
