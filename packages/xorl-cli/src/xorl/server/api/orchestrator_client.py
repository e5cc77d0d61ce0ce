"""The orchestrator as routes see it: questions with answers of a known type, across its restarts."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from typing import TypeVar

import msgspec

from xorl.server.api.refusal import Refusal
from xorl.server.api.settings import ApiSettings
from xorl.server.channel import ChannelClient, ChannelError, PeerLost
from xorl.server.identifiers import Dialect, session_of
from xorl.server.messages import Accepted, Finished, Ok, Pending, Poll, Rejected, Result, Submit, Tombstone, Unknown
from xorl.server.operations import Failure, Message, ModelOperation, Sample
from xorl.server.queries import Answer, GetService, Request, ServiceInfo

Wanted = TypeVar("Wanted", bound=Message)

_INFO_LASTS_S = 1.0
_ANSWER_S = 60.0
_LATE_S = 5.0
_AGAIN_S = 0.02
_TOO_LONG = "a whole number in this request has more than 64 bits: send a smaller one"


class OrchestratorClient:
    """Asks it. All that is asked may be asked twice, so what was lost with an orchestrator is asked of the next."""

    def __init__(self, settings: ApiSettings) -> None:
        self._client: ChannelClient[Answer] = ChannelClient(settings.orchestrator, Answer, keys=settings.keys)
        self._patience_s = settings.patience_s
        # Equal operations have equal bytes, whatever the order in which a client named things.
        self._encode = msgspec.msgpack.Encoder(order="deterministic").encode
        self._info: tuple[float, ServiceInfo] | None = None

    async def start(self) -> None:
        """Begin to connect."""
        await self._client.start()

    async def close(self) -> None:
        """Stop."""
        await self._client.close()

    @property
    def is_connected(self) -> bool:
        """Whether it answers."""
        return self._client.is_connected

    async def wait(self, seconds: float) -> None:
        """Until it answers, for at most so long."""
        with contextlib.suppress(TimeoutError, ChannelError):
            await self._client.wait_connected(seconds)

    async def ask(self, request: Request, wanted: type[Wanted], *, answer_s: float = _ANSWER_S) -> Wanted:
        """Its answer; Refusal where it rejects, or is not there for the settings' patience."""
        answer = await self._ask(request, answer_s, self._patience_s)
        if isinstance(answer, Rejected):
            raise Refusal(answer.status, answer.message)
        if not isinstance(answer, wanted):
            raise Refusal(500, f"the orchestrator answered {type(request).__name__} with {type(answer).__name__}")
        return answer

    async def info(self) -> ServiceInfo:
        """What is served, at most a second old."""
        now = time.monotonic()
        if self._info is None or now - self._info[0] > _INFO_LASTS_S:
            self._info = (now, await self.ask(GetService(), ServiceInfo))
        return self._info[1]

    async def submit(
        self,
        operation: ModelOperation | Sample,
        dialect: Dialect,
        *,
        key: str | None = None,
        seq_id: int | None = None,
        session_id: str | None = None,
    ) -> str:
        """Hand an operation on; returns the id to poll once it is journaled. See Submit for the arguments."""
        model_id = None if isinstance(operation, Sample) else operation.model_id
        if session_id is None and model_id is not None and ":" in model_id:
            session_id = session_of(model_id)
        try:
            encoded = self._encode(operation)
        except OverflowError:
            # No operation that has a place in its model's order holds numbers of a client's without a bound.
            raise Refusal(400, _TOO_LONG) from None
        submit = Submit(
            request_id=f"future_{secrets.token_hex(12)}",
            operation=operation,
            dialect=dialect,
            body_hash=hashlib.blake2b(encoded, digest_size=16).digest(),
            key=key,
            seq_id=seq_id,
            session_id=session_id,
        )
        return (await self.ask(submit, Accepted)).request_id

    async def refuse_place(self, model_id: str, seq_id: int | None) -> None:
        """Say that this seq_id will not come, since it was refused here; later ones would wait for it."""
        if seq_id is not None:
            await self.ask(Tombstone(model_id, seq_id), Ok)

    async def poll(self, request_id: str, wait_s: float) -> Pending | Finished | Unknown:
        """The result, waited for; Pending too where the orchestrator is being started again.

        It takes wait_s and little more, also across such a start: clients give up soon after.
        """
        end = time.monotonic() + wait_s
        while True:
            left = max(end - time.monotonic(), 0.0)
            poll = Poll(request_id, left)
            try:
                answer = await self._client.request(poll, timeout_s=left + _LATE_S, connect_timeout_s=left)
                break
            except (PeerLost, TimeoutError, ChannelError) as problem:
                if time.monotonic() >= end or not isinstance(problem, PeerLost):
                    return Pending(request_id, "paused_capacity", reason=f"the orchestrator is not there: {problem}")
                await asyncio.sleep(_AGAIN_S)
        if isinstance(answer, Rejected):
            raise Refusal(answer.status, answer.message)
        if not isinstance(answer, Pending | Finished | Unknown):
            raise Refusal(500, f"the orchestrator answered a poll with {type(answer).__name__}")
        return answer

    async def result(self, request_id: str, timeout_s: float) -> Result:
        """The result, however many polls it takes; Refusal for a failure, and after timeout_s."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            answer = await self.poll(request_id, min(left, 20.0))
            if isinstance(answer, Unknown):
                raise Refusal(410, f"the result of {request_id} is not kept any more")
            if isinstance(answer, Finished):
                if isinstance(answer.result, Failure):
                    raise Refusal(answer.result.status, answer.result.message)
                return answer.result
        raise Refusal(504, f"{request_id} has not finished within {timeout_s:g} s; it goes on, poll it")

    async def _ask(self, request: Request, answer_s: float, patience_s: float) -> Answer:
        end = time.monotonic() + patience_s
        while True:
            left = max(end - time.monotonic(), 0.1)
            try:
                return await self._client.request(request, timeout_s=answer_s, connect_timeout_s=left)
            except PeerLost as problem:
                if time.monotonic() >= end:
                    raise Refusal(503, f"the orchestrator is not there, it may be starting: {problem}") from None
                await asyncio.sleep(_AGAIN_S)
            except OverflowError:
                raise Refusal(400, _TOO_LONG) from None
            except TimeoutError:
                raise Refusal(503, f"the orchestrator has not answered within {answer_s:g} s") from None
            except ChannelError as problem:
                raise Refusal(503, f"the orchestrator could not answer: {problem}") from None
