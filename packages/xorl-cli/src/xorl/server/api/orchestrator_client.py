"""The routes' client of the orchestrator: requests with answers of known types, retried across its restarts."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from typing import TypeVar

import msgspec

from xorl.server.api.responses import Refusal, no_request
from xorl.server.channel import ChannelClient, ChannelError, PeerLost
from xorl.server.identifiers import Dialect, session_of
from xorl.server.messages import Accepted, Cancel, CancelOutcome, Finished, Pending, Poll, Rejected, Submit, Unknown
from xorl.server.operations import Failure, Message, ModelOperation, Sample
from xorl.server.queries import Answer, GetService, Request, ServiceInfo

AnswerT = TypeVar("AnswerT", bound=Message)

_INFO_MAX_AGE_S = 1.0
_ANSWER_TIMEOUT_S = 60.0
# Just below the clients' timeout for calls that are answered when the operation has ended.
_RESULT_TIMEOUT_S = 1750.0
# How much longer than the poll itself an answer to it may take.
_POLL_MARGIN_S = 5.0
_RETRY_DELAY_S = 0.02
_TOO_LONG = "an integer in this request has more than 64 bits: send a smaller one"


class OrchestratorClient:
    """Sends requests to the orchestrator and retries them for up to patience_s if it restarts; all are idempotent."""

    def __init__(self, address: str, patience_s: float) -> None:
        self._client: ChannelClient[Answer] = ChannelClient(address, Answer)
        self._patience_s = patience_s
        # Equal operations must have equal bytes, even if a client sends fields in another order.
        self._encode = msgspec.msgpack.Encoder(order="deterministic").encode
        self._info: tuple[float, ServiceInfo] | None = None

    async def start(self) -> None:
        """Start to connect in the background."""
        await self._client.start()

    async def close(self) -> None:
        """Disconnect and stop."""
        await self._client.close()

    @property
    def is_connected(self) -> bool:
        """Whether the orchestrator answers."""
        return self._client.is_connected

    async def wait(self, seconds: float) -> None:
        """Wait until the orchestrator answers, for at most `seconds`."""
        with contextlib.suppress(TimeoutError, ChannelError):
            await self._client.wait_connected(seconds)

    async def ask(
        self, request: Request, answer_type: type[AnswerT], *, timeout_s: float = _ANSWER_TIMEOUT_S
    ) -> AnswerT:
        """The answer to a request. Raises Refusal if it is rejected, or if the orchestrator stays unreachable."""
        answer = await self._ask(request, timeout_s)
        if isinstance(answer, Rejected):
            raise Refusal(answer.status, answer.message)
        if not isinstance(answer, answer_type):
            raise Refusal(500, f"the orchestrator answered {type(request).__name__} with {type(answer).__name__}")
        return answer

    async def info(self) -> ServiceInfo:
        """The service's properties, cached for a second."""
        now = time.monotonic()
        if self._info is None or now - self._info[0] > _INFO_MAX_AGE_S:
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
        source: str = "",
    ) -> str:
        """Submit an operation; returns the id to poll once it is in the journal. See Submit for the arguments."""
        model_id = None if isinstance(operation, Sample) else operation.model_id
        if session_id is None and model_id is not None and ":" in model_id:
            session_id = session_of(model_id)
        try:
            encoded = self._encode(operation)
        except OverflowError:
            # Only operations without a seq_id have unbounded integers from clients, so no seq_id needs to be skipped.
            raise Refusal(400, _TOO_LONG) from None
        submit = Submit(
            request_id=f"future_{secrets.token_hex(12)}",
            operation=operation,
            dialect=dialect,
            body_hash=hashlib.blake2b(encoded, digest_size=16).digest(),
            key=key,
            seq_id=seq_id,
            session_id=session_id,
            source=source,
        )
        return (await self.ask(submit, Accepted)).request_id

    async def poll(self, request_id: str, wait_s: float) -> Pending | Finished | Unknown:
        """Wait for a result for up to wait_s. Also returns Pending while the orchestrator restarts.

        Takes hardly longer than wait_s even across a restart, since clients time out soon after.
        """
        end = time.monotonic() + wait_s
        while True:
            left = max(end - time.monotonic(), 0.0)
            poll = Poll(request_id, left)
            try:
                answer = await self._client.request(poll, timeout_s=left + _POLL_MARGIN_S, connect_timeout_s=left)
                break
            except (PeerLost, TimeoutError, ChannelError) as problem:
                if time.monotonic() >= end or not isinstance(problem, PeerLost):
                    return Pending(request_id, "paused_capacity", reason=f"the orchestrator is unreachable: {problem}")
                await asyncio.sleep(_RETRY_DELAY_S)
        if isinstance(answer, Rejected):
            raise Refusal(answer.status, answer.message)
        if not isinstance(answer, Pending | Finished | Unknown):
            raise Refusal(500, f"the orchestrator answered a poll with {type(answer).__name__}")
        return answer

    async def cancel(self, request_id: str) -> CancelOutcome:
        """Cancel a request if it has not begun, or is a sample or a pass. Raises Refusal(404) for an unknown id."""
        answer = await self._ask(Cancel(request_id), _ANSWER_TIMEOUT_S)
        if isinstance(answer, Unknown):
            raise no_request(request_id)
        if isinstance(answer, Rejected):
            raise Refusal(answer.status, answer.message)
        if not isinstance(answer, CancelOutcome):
            raise Refusal(500, f"the orchestrator answered Cancel with {type(answer).__name__}")
        return answer

    async def run(self, operation: ModelOperation, result_type: type[AnswerT]) -> AnswerT:
        """Submit an operation and wait for its result, as `result` does."""
        return await self.result(await self.submit(operation, "xorl"), result_type)

    async def result(self, request_id: str, result_type: type[AnswerT]) -> AnswerT:
        """Poll until the result is there. Raises Refusal if the operation failed, or after _RESULT_TIMEOUT_S."""
        end = time.monotonic() + _RESULT_TIMEOUT_S
        while (left := end - time.monotonic()) > 0:
            answer = await self.poll(request_id, min(left, 20.0))
            if isinstance(answer, Unknown):
                raise Refusal(410, f"the result of {request_id} has expired")
            if isinstance(answer, Finished):
                result = answer.result
                if isinstance(result, Failure):
                    raise Refusal(result.status, result.message, code=result.code)
                if not isinstance(result, result_type):
                    raise Refusal(500, f"{request_id} returned {type(result).__name__}, not {result_type.__name__}")
                return result
        raise Refusal(
            504, f"{request_id} has not finished within {_RESULT_TIMEOUT_S:g} s but is still running: poll for it"
        )

    async def _ask(self, request: Request, timeout_s: float) -> Answer:
        end = time.monotonic() + self._patience_s
        while True:
            left = max(end - time.monotonic(), 0.1)
            try:
                return await self._client.request(request, timeout_s=timeout_s, connect_timeout_s=left)
            except PeerLost as problem:
                if time.monotonic() >= end:
                    raise Refusal(503, f"the orchestrator is unreachable, it may be starting: {problem}") from None
                await asyncio.sleep(_RETRY_DELAY_S)
            except OverflowError:
                raise Refusal(400, _TOO_LONG) from None
            except TimeoutError:
                raise Refusal(503, f"the orchestrator has not answered within {timeout_s:g} s") from None
            except ChannelError as problem:
                raise Refusal(503, f"the orchestrator could not answer: {problem}") from None
