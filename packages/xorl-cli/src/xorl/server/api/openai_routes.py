"""The OpenAI-compatible routes: models, completions and chat completions, answered at once or as a stream."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from xorl.server.api.context import api_of
from xorl.server.api.gate import SMALL_BYTES, decode
from xorl.server.api.openai_answers import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    prompt_rows,
    rows_of,
    usage,
)
from xorl.server.api.openai_bodies import ChatBody, CompletionBody
from xorl.server.api.openai_calls import Call, Part, chat_call, completion_call, find_model, parts_of, read_answer
from xorl.server.api.openai_fields import Body, read_fields
from xorl.server.api.responses import JSON, Refusal, json_response, openai_error, refuse_invalid
from xorl.server.api.routed_experts import record_json
from xorl.server.api.sampling_calls import event_stream, sample, while_connected
from xorl.server.api.token_texts import Offsets
from xorl.server.api.tool_formats import ToolCall
from xorl.server.operations import Sample, SampledSequence, SampleResult
from xorl.server.queries import ListServedModels, ServedModel, ServedModels, ServiceInfo

logger = logging.getLogger(__name__)

router = APIRouter(prefix="/v1")

_encode = msgspec.json.Encoder().encode


@router.get("/models")
async def list_models(request: Request) -> Response:
    """List the names that `model` may have: the base, clients' models, and weights that they saved for sampling."""
    api = api_of(request)
    served = await api.orchestrator.ask(ListServedModels(), ServedModels)
    info = await api.orchestrator.info()
    return json_response({"object": "list", "data": [_model_json(model, info) for model in served.models]})


@router.get("/models/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    """Describe one of them."""
    api = api_of(request)
    return json_response(_model_json(await find_model(api, name), await api.orchestrator.info()))


@router.post("/completions")
async def completions(request: Request) -> Response:
    """Continue texts or token ids."""
    return await _answer(request, await completion_call(api_of(request), await read_body(request, CompletionBody)))


@router.post("/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, rendered with the model's chat template."""
    return await _answer(request, await chat_call(api_of(request), await read_body(request, ChatBody)))


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The body of a request; raises Refusal."""
    body = await api_of(request).bodies.read(request, SMALL_BYTES)
    given = decode(body, dict[str, Any])
    with refuse_invalid():
        return read_fields(given, kind)


async def _answer(request: Request, call: Call) -> Response:
    if call.body.stream:
        return await event_stream(request, _events(call))
    samples = asyncio.gather(*(sample(call.api, operation) for operation in call.operations))
    found = await while_connected(request, _collected(samples))
    choices: list[JSON] = []
    num_sampled = num_cached = 0
    for prompt, (_, result) in zip(call.prompts, found, strict=True):
        num_cached += result.num_cached_tokens
        num_sampled += sum(one.tokens.shape[0] for one in result.sequences)
        if result.sequences:
            choices += [_choice(call, len(choices) + i, prompt, one, result) for i, one in enumerate(result.sequences)]
        else:
            choices += [_choice(call, len(choices) + i, prompt, None, result) for i in range(call.body.n)]
    answer = {
        "id": _answer_id(call),
        **call.header,
        "choices": choices,
        "usage": usage(sum(map(len, call.prompts)), num_sampled, num_cached),
    }
    if call.is_chat:
        result = found[0][1]
        answer |= _of_prompt(call, call.prompts[0], result)
    return json_response(answer)


async def _collected(samples: asyncio.Future[list[tuple[str, SampleResult]]]) -> list[tuple[str, SampleResult]]:
    return await samples


def _choice(
    call: Call, index: int, prompt: list[int], sequence: SampledSequence | None, result: SampleResult
) -> dict[str, JSON]:
    """One choice of an answer. sequence: None if the call only scores its prompt."""
    tokens: list[int] = [] if sequence is None else sequence.tokens.numpy().tolist()
    text, calls, reason = ("", (), "length") if sequence is None else read_answer(call, sequence)
    body, texts = call.body, call.texts
    rows = [] if sequence is None else rows_of(sequence)
    choice: dict[str, JSON] = {"index": index, "finish_reason": reason}
    if body.return_token_ids:
        choice["token_ids"] = tokens
    if body.return_routed_experts:
        routes = None if sequence is None else sequence.routed_experts
        choice["routed_experts"] = record_json(result.prompt_routed_experts, routes)
    if isinstance(body, ChatBody):
        message: dict[str, JSON] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text or None
            message["tool_calls"] = [tool_call_json(call, one, number) for number, one in enumerate(calls)]
        choice["message"] = message
        choice["logprobs"] = chat_logprobs(rows, texts) if call.wants_logprobs else None
        return choice
    if body.echo:
        text = texts.decode(prompt) + text
        rows = prompt_rows(prompt, result, body.logprobs or 0) + rows
    choice["text"] = text
    choice["logprobs"] = completion_logprobs(rows, texts, Offsets(texts)) if call.wants_logprobs else None
    return choice | _of_prompt(call, prompt, result)


def _of_prompt(call: Call, prompt: list[int], result: SampleResult) -> dict[str, JSON]:
    """The fields of an answer about its prompt."""
    found: dict[str, JSON] = {}
    if call.body.return_token_ids:
        found["prompt_token_ids"] = prompt
    if call.body.prompt_logprobs is not None:
        rows = prompt_rows(prompt, result, call.body.prompt_logprobs)
        found["prompt_logprobs"] = prompt_logprobs(rows, call.texts)
    return found


async def _events(call: Call) -> AsyncGenerator[bytes]:
    """The server-sent events of a stream. An error ends it, as its last event; raises Refusal if it is the first."""
    head = {"id": _answer_id(call), **call.header}
    num_sampled = 0
    chunks: asyncio.Queue[tuple[dict[str, JSON], int] | Refusal | None] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_stream_choice(call, prompt, replace(operation, num_samples=1), index, chunks))
        for prompt, (index, operation) in _choices(call)
    ]
    try:
        num_running, num_chunks = len(tasks), 0
        while num_running:
            chunk = await chunks.get()
            if isinstance(chunk, Refusal):
                if not num_chunks:
                    raise chunk
                yield _event(openai_error(chunk))
                return
            if chunk is None:
                num_running -= 1
                continue
            choice, num_tokens = chunk
            num_chunks += 1
            num_sampled += num_tokens
            yield _event({**head, "choices": [choice]})
        if call.body.stream_options.include_usage:
            num_prompt = sum(map(len, call.prompts))
            yield _event({**head, "choices": [], "usage": usage(num_prompt, num_sampled, 0)})
        yield b"data: [DONE]\n\n"
    finally:
        # The client may have disconnected; its samples end with its tasks.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _choices(call: Call) -> list[tuple[list[int], tuple[int, Sample]]]:
    """Each choice's prompt, index and operation: sample i of a request has its seed + i."""
    found: list[tuple[list[int], tuple[int, Sample]]] = []
    for prompt, operation in zip(call.prompts, call.operations, strict=True):
        assert operation.seed is not None, "the body sets one"
        found += [
            (prompt, (len(found) + i, replace(operation, seed=operation.seed + i)))
            for i in range(operation.num_samples)
        ]
    return found


async def _stream_choice(
    call: Call,
    prompt: list[int],
    operation: Sample,
    index: int,
    chunks: asyncio.Queue[tuple[dict[str, JSON], int] | Refusal | None],
) -> None:
    """Put the chunks of one choice into the queue, then None, or the refusal that ended it."""
    body, offsets, num_calls = call.body, Offsets(call.texts), 0
    try:
        async for part in parts_of(call, operation):
            tokens = part.sequence.tokens.numpy().tolist()
            choice: dict[str, JSON] = {"index": index, "finish_reason": part.reason}
            if body.return_token_ids:
                choice["token_ids"] = tokens
                if part.is_first:
                    choice["prompt_token_ids"] = prompt
            if call.is_chat:
                choice["delta"] = _delta(call, part, num_calls)
                num_calls += len(part.calls)
            else:
                choice["text"] = part.text
            choice["logprobs"] = _chunk_logprobs(call, part.sequence, offsets) if call.wants_logprobs else None
            await chunks.put((choice, len(tokens)))
    except Refusal as refusal:
        await chunks.put(refusal)
    except Exception:
        # Nothing else waits for this task.
        logger.exception("event=stream_failed")
        await chunks.put(Refusal(500, "the service failed on this request, see its log"))
    else:
        await chunks.put(None)


def _delta(call: Call, part: Part, num_calls: int) -> dict[str, JSON]:
    """The fields that a part adds to a message that has `num_calls` tool calls already."""
    delta: dict[str, JSON] = {"content": part.text}
    if part.is_first:
        delta["role"] = "assistant"
    if part.calls:
        delta["tool_calls"] = [
            {"index": number, **tool_call_json(call, one, number)} for number, one in enumerate(part.calls, num_calls)
        ]
    return delta


def _chunk_logprobs(call: Call, part: SampledSequence, offsets: Offsets) -> dict[str, JSON]:
    rows = rows_of(part)
    return chat_logprobs(rows, call.texts) if call.is_chat else completion_logprobs(rows, call.texts, offsets)


def _answer_id(call: Call) -> str:
    return f"{'chatcmpl' if call.is_chat else 'cmpl'}-{call.body.request_id or secrets.token_hex(12)}"


def tool_call_json(call: Call, made: ToolCall, index: int) -> dict[str, JSON]:
    """A tool call in a message. index: of the calls in the answer."""
    function: dict[str, JSON] = {"name": made.name, "arguments": made.arguments}
    return {"id": call.new_call_id(made.name, index), "type": "function", "function": function}


def _event(content: JSON) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"


def _model_json(model: ServedModel, info: ServiceInfo) -> dict[str, JSON]:
    is_base = model.name == info.model_name
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.created),
        "owned_by": "xorl",
        "root": info.model_name,
        "parent": None if is_base else info.model_name,
        "max_model_len": info.max_context_length,
    }
