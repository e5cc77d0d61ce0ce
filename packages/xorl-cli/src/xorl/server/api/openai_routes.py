"""The OpenAI-compatible routes: models, completions and chat completions, answered at once or as a stream."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from fastapi import APIRouter
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from xorl.server.api.context import Api, api_of
from xorl.server.api.openai_answers import (
    Texts,
    chat_logprobs,
    completion_logprobs,
    prompt_rows,
    rows_of,
    usage,
)
from xorl.server.api.openai_bodies import ChatBody, CompletionBody
from xorl.server.api.responses import JSON, Refusal, json_response, openai_error, refuse_invalid
from xorl.server.api.sampling_calls import sample, sample_in_parts, while_connected
from xorl.server.api.text import TextStream, until_stop
from xorl.server.operations import Sample, SampledSequence, SampleResult
from xorl.server.queries import FindServedModel, ListServedModels, ServedModel, ServedModels, ServiceInfo

logger = logging.getLogger(__name__)

router = APIRouter(prefix="/v1")

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Call:
    """A call whose prompts are tokens. name: of the model, as the client gave it."""

    api: Api
    kind: Literal["chat.completion", "text_completion"]
    body: ChatBody | CompletionBody
    texts: Texts
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
        return bool(self.body.logprobs) if isinstance(self.body, ChatBody) else self.body.logprobs is not None


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
    model = await api.orchestrator.ask(FindServedModel(name), ServedModel)
    return json_response(_model_json(model, await api.orchestrator.info()))


@router.post("/completions")
async def completions(request: Request) -> Response:
    """Continue texts or token ids."""
    api = api_of(request)
    body = await api.bodies.parse(request, CompletionBody)
    info = await api.orchestrator.info()
    with refuse_invalid():
        prompts = body.prompts
    encoded = [await api.text.encode(info.tokenizer, one) if isinstance(one, str) else one for one in prompts]
    return await _answer(request, await _call(api, "text_completion", body, info, encoded))


@router.post("/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, rendered with the model's chat template."""
    api = api_of(request)
    body = await api.bodies.parse(request, ChatBody)
    info = await api.orchestrator.info()
    with refuse_invalid():
        messages = [message.for_template() for message in body.messages]
    prompt = await api.text.encode_chat(
        info.tokenizer, messages, body.chat_template_kwargs, asks_for_answer=body.add_generation_prompt
    )
    return await _answer(request, await _call(api, "chat.completion", body, info, [prompt]))


async def _call(
    api: Api,
    kind: Literal["chat.completion", "text_completion"],
    body: ChatBody | CompletionBody,
    info: ServiceInfo,
    prompts: Sequence[list[int]],
) -> Call:
    model = await api.orchestrator.ask(FindServedModel(body.model), ServedModel)
    with refuse_invalid():
        operations = [body.operation(model.sampler, prompt, info.vocab_size) for prompt in prompts]
        if body.stream:
            operations = [_with_limit(operation, info) for operation in operations]
    return Call(api, kind, body, Texts(await api.text.require(info.tokenizer)), prompts, operations)


def _with_limit(operation: Sample, info: ServiceInfo) -> Sample:
    """The operation with max_tokens, which a sample in parts needs; by default it fills the context."""
    if operation.max_tokens is not None:
        return operation
    room = (info.max_context_length or 0) - operation.prompt.shape[0] + 1
    if room < 1:
        raise ValueError("max_tokens is missing, and the prompt already fills the model's context: shorten the prompt")
    return replace(operation, max_tokens=room)


async def _answer(request: Request, call: Call) -> Response:
    if call.body.stream:
        return StreamingResponse(_events(call), media_type="text/event-stream")
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
        answer["prompt_token_ids"] = call.prompts[0]
    return json_response(answer)


async def _collected(samples: asyncio.Future[list[tuple[str, SampleResult]]]) -> list[tuple[str, SampleResult]]:
    return await samples


def _choice(
    call: Call, index: int, prompt: list[int], sequence: SampledSequence | None, result: SampleResult
) -> dict[str, JSON]:
    """One choice of an answer. sequence: None if the call only scores its prompt."""
    tokens = [] if sequence is None else sequence.tokens.numpy().tolist()
    text, _ = until_stop(call.texts.decode(tokens), call.body.stops)
    rows = [] if sequence is None else rows_of(sequence)
    choice: dict[str, JSON] = {
        "index": index,
        "finish_reason": "length" if sequence is None else sequence.stop_reason,
        "token_ids": tokens,
    }
    if isinstance(call.body, ChatBody):
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        choice["logprobs"] = chat_logprobs(rows, call.texts) if call.wants_logprobs else None
        return choice
    if call.body.echo:
        text = call.texts.decode(prompt) + text
        rows = prompt_rows(prompt, result) + rows
    choice["text"] = text
    choice["logprobs"] = completion_logprobs(rows, call.texts) if call.wants_logprobs else None
    choice["prompt_token_ids"] = prompt
    return choice


async def _events(call: Call) -> AsyncIterator[bytes]:
    """The server-sent events of a stream. An error ends it, as its last event."""
    head = {"id": _answer_id(call), **call.header}
    num_sampled = 0
    chunks: asyncio.Queue[tuple[dict[str, JSON], int] | Refusal | None] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_stream_choice(call, prompt, replace(operation, num_samples=1), index, chunks))
        for prompt, (index, operation) in _choices(call)
    ]
    try:
        num_running = len(tasks)
        while num_running:
            chunk = await chunks.get()
            if isinstance(chunk, Refusal):
                yield _event(openai_error(chunk))
                return
            if chunk is None:
                num_running -= 1
                continue
            choice, num_tokens = chunk
            num_sampled += num_tokens
            yield _event({**head, "choices": [choice]})
        if call.body.stream_options is not None and call.body.stream_options.include_usage:
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
    stream = TextStream(call.texts.decode, call.body.stops)
    num_sampled = num_chars = 0
    try:
        async for part in sample_in_parts(call.api, operation):
            tokens = part.tokens.numpy().tolist()
            is_first, num_sampled = num_sampled == 0, num_sampled + len(tokens)
            is_last = part.stop_reason == "stop" or num_sampled == operation.max_tokens
            text = stream.add(tokens, is_last=is_last)
            choice: dict[str, JSON] = {
                "index": index,
                "finish_reason": part.stop_reason if is_last else None,
                "token_ids": tokens,
                "logprobs": None,
            }
            if is_first:
                choice["prompt_token_ids"] = prompt
            if call.is_chat:
                choice["delta"] = {"content": text} | ({"role": "assistant"} if is_first else {})
            else:
                choice["text"] = text
            if call.wants_logprobs:
                rows = rows_of(part)
                choice["logprobs"] = (
                    chat_logprobs(rows, call.texts)
                    if call.is_chat
                    else completion_logprobs(rows, call.texts, num_chars)
                )
            num_chars += sum(len(call.texts.token(token)) for token in tokens)
            await chunks.put((choice, len(tokens)))
    except Refusal as refusal:
        await chunks.put(refusal)
    except Exception:
        # Nothing else waits for this task.
        logger.exception("event=stream_failed")
        await chunks.put(Refusal(500, "the service failed on this request, see its log"))
    else:
        await chunks.put(None)


def _answer_id(call: Call) -> str:
    return f"{'chatcmpl' if call.is_chat else 'cmpl'}-{secrets.token_hex(12)}"


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
