"""The OpenAI-compatible routes: models, completions and chat completions, answered at once or as a stream."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from xorl.server.api.context import Api, api_of
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
from xorl.server.api.openai_fields import Body, read_fields
from xorl.server.api.responses import JSON, Refusal, json_response, openai_error, refuse_invalid
from xorl.server.api.routed_experts import record_json
from xorl.server.api.sampling_calls import sample, sample_in_parts, while_connected
from xorl.server.api.token_texts import Offsets, TokenTexts
from xorl.server.context_length import check_context
from xorl.server.operations import Sample, SampledSequence, SampleResult
from xorl.server.queries import FindServedModel, ListServedModels, ServedModel, ServedModels, ServiceInfo
from xorl.server.sample_text import TextStream, sample_text

logger = logging.getLogger(__name__)

router = APIRouter(prefix="/v1")

# A save of a model's weights waits for the model's earlier requests.
_SAVE_TIMEOUT_S = 600.0
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Call:
    """A call whose prompts are tokens. name: of the model, as the client gave it."""

    api: Api
    kind: Literal["chat.completion", "text_completion"]
    body: ChatBody | CompletionBody
    texts: TokenTexts
    prompts: Sequence[list[int]]
    operations: Sequence[Sample]

    @property
    def is_chat(self) -> bool:
        return self.kind == "chat.completion"

    @property
    def header(self) -> dict[str, JSON]:
        """What every answer and every chunk begins with, but for the id."""
        suffix = ".chunk" if self.is_chat and self.body.stream else ""
        return {"object": self.kind + suffix, "created": int(time.time()), "model": self.body.model}

    @property
    def wants_logprobs(self) -> bool:
        return self.body.logprobs if isinstance(self.body, ChatBody) else self.body.logprobs is not None


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
    return json_response(_model_json(await _find_model(api, name), await api.orchestrator.info()))


@router.post("/completions")
async def completions(request: Request) -> Response:
    """Continue texts or token ids."""
    api = api_of(request)
    body = await _read_body(request, CompletionBody)
    info = await api.orchestrator.info()
    with refuse_invalid():
        prompts = body.prompts
    encoded = [
        await api.text.encode(info.tokenizer, one, add_special_tokens=body.add_special_tokens)
        if isinstance(one, str)
        else one
        for one in prompts
    ]
    return await _answer(request, await _call(api, "text_completion", body, info, encoded))


@router.post("/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, rendered with the model's chat template."""
    api = api_of(request)
    body = await _read_body(request, ChatBody)
    info = await api.orchestrator.info()
    with refuse_invalid():
        messages, asks_for_answer = body.rendered_messages, body.asks_for_answer
    prompt = await api.text.encode_chat(
        info.tokenizer,
        messages,
        body.template_variables,
        asks_for_answer=asks_for_answer,
        continues_last=body.continue_final_message,
    )
    return await _answer(request, await _call(api, "chat.completion", body, info, [prompt]))


async def _read_body(request: Request, kind: type[Body]) -> Body:
    body = await api_of(request).bodies.read(request, SMALL_BYTES)
    given = decode(body, dict[str, Any])
    with refuse_invalid():
        return read_fields(given, kind)


async def _find_model(api: Api, name: str, *, saves: bool = False) -> ServedModel:
    """Find the model of a name. saves: its current weights are needed, so save them first if necessary."""
    try:
        return await api.orchestrator.ask(FindServedModel(name, saves), ServedModel, timeout_s=_SAVE_TIMEOUT_S)
    except Refusal as refusal:
        code = "model_not_found" if refusal.status == 404 else None
        raise Refusal(refusal.status, refusal.message, code=code, param="model") from None


async def _call(
    api: Api,
    kind: Literal["chat.completion", "text_completion"],
    body: ChatBody | CompletionBody,
    info: ServiceInfo,
    prompts: Sequence[list[int]],
) -> Call:
    sampler = (await _find_model(api, body.model, saves=True)).sampler
    assert sampler is not None, "its weights have been saved"
    with refuse_invalid():
        prompts = [body.truncated(prompt) for prompt in prompts]
        operations = [body.operation(sampler, prompt, info.vocab_size) for prompt in prompts]
        operations = [_within_context(operation, body, info.max_context_length) for operation in operations]
    texts = TokenTexts(
        await api.text.require(info.tokenizer),
        await api.text.token_bytes(info.tokenizer),
        as_ids=body.return_tokens_as_token_ids,
        skips_special=body.skip_special_tokens,
    )
    return Call(api, kind, body, texts, prompts, operations)


def _within_context(operation: Sample, body: ChatBody | CompletionBody, limit: int | None) -> Sample:
    """The operation; for a stream, with max_tokens set, as sampling in parts requires (default: fill the context)."""
    if limit is None:
        raise Refusal(503, "the workers have not reported the model's context length yet: retry the request")
    num_prompt = operation.prompt.shape[0]
    check_context(num_prompt, 1 if operation.max_tokens is None else operation.max_tokens, limit)
    if not body.stream or operation.max_tokens is not None:
        return operation
    return replace(operation, max_tokens=limit - num_prompt + 1)


async def _answer(request: Request, call: Call) -> Response:
    if call.body.stream:
        return await _stream(request, call)
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
    reason = "length" if sequence is None else sequence.stop_reason
    body, texts = call.body, call.texts
    text = sample_text(
        texts.decode,
        tokens,
        body.stops,
        is_stopped=reason == "stop",
        keeps_stop=body.include_stop_str_in_output,
    )
    rows = [] if sequence is None else rows_of(sequence)
    choice: dict[str, JSON] = {"index": index, "finish_reason": reason}
    if body.return_token_ids:
        choice["token_ids"] = tokens
    if body.return_routed_experts:
        routes = None if sequence is None else sequence.routed_experts
        choice["routed_experts"] = record_json(result.prompt_routed_experts, routes)
    if isinstance(body, ChatBody):
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
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


async def _stream(request: Request, call: Call) -> Response:
    """The stream of an answer. A request that fails at once is refused with a status, as without a stream."""
    events = _events(call)
    try:
        first = await while_connected(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return StreamingResponse(_joined(first, events), media_type="text/event-stream")


async def _joined(first: bytes, events: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for event in events:
            yield event
    finally:
        await events.aclose()


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
    body, texts = call.body, call.texts
    stream = TextStream(texts.decode, body.stops, keeps_stop=body.include_stop_str_in_output)
    offsets = Offsets(texts)
    num_sampled = 0
    try:
        async for part in sample_in_parts(call.api, operation):
            tokens = part.tokens.numpy().tolist()
            is_first, num_sampled = num_sampled == 0, num_sampled + len(tokens)
            is_stopped = part.stop_reason == "stop"
            is_last = is_stopped or num_sampled == operation.max_tokens
            text = stream.add(tokens, is_last=is_last, is_stopped=is_stopped)
            choice: dict[str, JSON] = {"index": index, "finish_reason": part.stop_reason if is_last else None}
            if body.return_token_ids:
                choice["token_ids"] = tokens
                if is_first:
                    choice["prompt_token_ids"] = prompt
            if call.is_chat:
                choice["delta"] = {"content": text} | ({"role": "assistant"} if is_first else {})
            else:
                choice["text"] = text
            choice["logprobs"] = _chunk_logprobs(call, part, offsets) if call.wants_logprobs else None
            await chunks.put((choice, len(tokens)))
    except Refusal as refusal:
        await chunks.put(refusal)
    except Exception:
        # Nothing else waits for this task.
        logger.exception("event=stream_failed")
        await chunks.put(Refusal(500, "the service failed on this request, see its log"))
    else:
        await chunks.put(None)


def _chunk_logprobs(call: Call, part: SampledSequence, offsets: Offsets) -> dict[str, JSON]:
    rows = rows_of(part)
    return chat_logprobs(rows, call.texts) if call.is_chat else completion_logprobs(rows, call.texts, offsets)


def _answer_id(call: Call) -> str:
    return f"{'chatcmpl' if call.is_chat else 'cmpl'}-{call.body.request_id or secrets.token_hex(12)}"


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
