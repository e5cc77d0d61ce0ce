"""Shared by the routes: the process's settings and parts, a request's dialect, and submitting operations in order."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zstandard
from starlette.requests import Request
from starlette.responses import Response

from xorl.server.api.gate import HEAD_BYTES, ApiMetrics, BodyReader, decompress
from xorl.server.api.openai_responses import Conversations
from xorl.server.api.orchestrator_client import OrchestratorClient
from xorl.server.api.protobuf import parse
from xorl.server.api.responses import Refusal, json_response
from xorl.server.api.text import TextCoder
from xorl.server.channel import Limits
from xorl.server.channel.wire import is_loopback
from xorl.server.identifiers import Dialect, check_model_id
from xorl.server.messages import Ok, Tombstone, Unreadable
from xorl.server.operations import ModelOperation, Sample
from xorl.server.queries import ServiceInfo

# Longer bodies are decoded in a thread; for shorter ones a thread costs more than it saves.
_THREAD_BYTES = 2**18
_MODEL_ID = re.compile(rb'"model_id"\s*:\s*"([^"\\]{1,200})"')
_SEQ_ID = re.compile(rb'"seq_id"\s*:\s*(\d{1,16})(?!\d)')
# In protobuf: the tag and length of field 1, a string, and later the tag of field 2 with a varint of up to five bytes.
_STRING = re.compile(rb"\x0a([\x01-\x7f]|[\x80-\xff]\x01)", re.DOTALL)
_VARINT = re.compile(rb"\x10([\x80-\xff]{0,4}[\x00-\x7f])", re.DOTALL)


@dataclass(frozen=True)
class ApiSettings:
    """Addresses, keys and limits of the API process.

    Attributes:
        orchestrator: its address.
        host: the address that the API listens on.
        token: the API token that clients must send; None is allowed only if the host is a loopback address.
        body_bytes: the maximum length of a body, also after decompression and after sparse tensors are made dense.
        bytes_in_flight: the maximum length of all bodies that are being read at once.
        poll_s: how long a poll waits for the result.
        patience_s: how long a request waits for a restarting orchestrator before it is answered with 503.
        signs: the launcher's folder for signs of life.
    """

    orchestrator: str
    host: str = "127.0.0.1"
    port: int = 5555
    token: str | None = field(default=None, repr=False)
    body_bytes: int = 256 * 2**20
    bytes_in_flight: int = 2 * 2**30
    poll_s: float = 25.0
    patience_s: float = 30.0
    signs: Path | None = None

    def __post_init__(self) -> None:
        # An operation is about as long as its body, and the rest of a message is far below a tenth of it.
        longest = Limits().message_bytes * 9 // 10
        if not 0 < self.body_bytes <= longest:
            raise ValueError(f"max_request_mb must be above 0 and at most {longest // 10**6}, the limit of a message")
        if not 0 < self.poll_s <= 30:
            raise ValueError(
                f"poll_s must be above 0 and at most 30, so that clients do not time out; got {self.poll_s}"
            )
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from other machines: set api_token, or use host 127.0.0.1"
            )
        if self.token is not None and len(self.token) < 16:
            raise ValueError("api_token has fewer than 16 characters: use a long random one")


@dataclass(frozen=True)
class Api:
    """The parts of the process. decode_slots: limits how many long bodies are decoded at once, to bound the memory."""

    settings: ApiSettings
    orchestrator: OrchestratorClient
    bodies: BodyReader
    metrics: ApiMetrics
    text: TextCoder
    conversations: Conversations
    decode_slots: asyncio.Semaphore


@dataclass(frozen=True)
class OrderedOperation:
    """An operation with its position in the order of its model's calls; see `messages.Submit` for the fields."""

    operation: ModelOperation | Sample
    key: str | None = None
    seq_id: int | None = None
    session_id: str | None = None


def api_of(request: Request) -> Api:
    """The parts of the process that handles a request."""
    return request.app.state.api


def dialect_of(request: Request) -> Dialect:
    """The dialect of the answer. Only newer releases of tinker send their version; all send their name."""
    is_tinker = "x-sdk-version" in request.headers or "Tinker/" in request.headers.get("user-agent", "")
    return "tinker" if is_tinker else "xorl"


def is_protobuf(request: Request) -> bool:
    """Whether the request's body is protobuf, by its content type."""
    return request.headers.get("content-type", "").startswith("application/x-protobuf")


async def submit_operation(
    request: Request, read: Callable[[bytes, ServiceInfo], OrderedOperation]
) -> tuple[str, OrderedOperation]:
    """Read the body and submit its operation; returns the id to poll and the operation.

    If the request is refused permanently, its seq_id is marked as skipped, so that later calls do not wait for it.
    If its body is so damaged that the seq_id cannot be read, the orchestrator infers the missing number.

    read: converts the body to an operation; raises ValueError or Refusal if it is invalid.
    """
    api, body = api_of(request), None
    try:
        body = await api.bodies.read(request)
        info = await api.orchestrator.info()
        if len(body) > _THREAD_BYTES:
            async with api.decode_slots:
                ordered = await asyncio.to_thread(read, body, info)
        else:
            ordered = read(body, info)
    except (ValueError, Refusal) as problem:
        refusal = problem if isinstance(problem, Refusal) else Refusal(400, str(problem))
        if refusal.is_final:
            await _skip_refused(request, body)
        raise refusal from None
    request_id = await api.orchestrator.submit(
        ordered.operation,
        dialect_of(request),
        key=ordered.key,
        seq_id=ordered.seq_id,
        session_id=ordered.session_id,
        source=_source_of(request),
    )
    return request_id, ordered


async def future_response(request: Request, read: Callable[[bytes, ServiceInfo], OrderedOperation]) -> Response:
    """Submit the request's operation and answer with the id that the client polls."""
    request_id, ordered = await submit_operation(request, read)
    answer: dict[str, str | list[str]] = {"request_id": request_id}
    if isinstance(ordered.operation, Sample):
        # Derived from the request's id, so that a retry gets the same ids. Scoring a prompt returns no sample.
        num_sequences = 0 if ordered.operation.max_tokens == 0 else ordered.operation.num_samples
        answer["sample_sequence_ids"] = [f"{request_id}:{index}" for index in range(num_sequences)]
    else:
        answer["model_id"] = ordered.operation.model_id
    return json_response(answer)


async def _skip_refused(request: Request, body: bytes | None) -> None:
    """Keep later calls from waiting for the seq_id of a refused request. body: None if it was not read completely."""
    api, sequence = api_of(request), _sequence_of(request, body)
    if sequence is not None:
        await api.orchestrator.ask(Tombstone(*sequence), Ok)
    elif body is None or not _is_legible(request, body):
        await api.orchestrator.ask(Unreadable(_source_of(request)), Ok)


def _source_of(request: Request) -> str:
    """The client's address and program, which distinguish most clients."""
    address = "" if request.client is None else request.client.host
    return f"{address} {request.headers.get('user-agent', '')[:200]}"


def _is_legible(request: Request, body: bytes) -> bool:
    """Whether a body is well-formed. If so, and no seq_id was found in it, it has none."""
    try:
        if is_protobuf(request):
            parse("ForwardBackwardRequest", body)
        else:
            msgspec.json.decode(body, type=msgspec.Raw)
    except (ValueError, RecursionError):
        return False
    return True


def _sequence_of(request: Request, body: bytes | None) -> tuple[str, int] | None:
    """The model and seq_id of a refused request, from the beginning and end of its body; None if they are not there."""
    try:
        ends = _head_of(request) if body is None else body[:HEAD_BYTES] + body[HEAD_BYTES:][-HEAD_BYTES:]
    except zstandard.ZstdError:
        return None
    found = _in_protobuf(ends) if is_protobuf(request) else _in_json(ends)
    if found is None:
        return None
    try:
        return check_model_id(found[0].decode()), found[1]
    except ValueError:
        return None


def _head_of(request: Request) -> bytes:
    """The beginning of a body that was not read completely. Raises ZstdError if it is damaged."""
    head: bytes = getattr(request.state, "head", b"")
    return decompress(head, HEAD_BYTES) if request.headers.get("content-encoding") == "zstd" else head


def _in_json(head: bytes) -> tuple[bytes, int] | None:
    model_id, seq_id = _MODEL_ID.search(head), _SEQ_ID.search(head)
    return None if model_id is None or seq_id is None else (model_id[1], int(seq_id[1]))


def _in_protobuf(head: bytes) -> tuple[bytes, int] | None:
    length = _STRING.match(head)
    if length is None:
        return None
    size = length[1][0] if len(length[1]) == 1 else (length[1][0] & 0x7F) + (length[1][1] << 7)
    end = length.end() + size
    number = _VARINT.match(head, end)
    if number is None:
        return None
    seq_id = sum((byte & 0x7F) << (7 * index) for index, byte in enumerate(number[1]))
    return head[length.end() : end], seq_id
