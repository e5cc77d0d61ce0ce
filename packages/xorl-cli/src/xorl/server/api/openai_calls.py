"""Calls of OpenAI's API after validation: their prompts, operations, and how their answers' texts are read."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec.structs import replace

from xorl.server.api.context import Api
from xorl.server.api.openai_bodies import ChatBody, ChatMessage, CompletionBody
from xorl.server.api.responses import JSON, Refusal, refuse_invalid
from xorl.server.api.sampling_calls import sample_in_parts
from xorl.server.api.token_texts import TokenTexts
from xorl.server.api.tool_bodies import Tools, answer_form, read_format, read_tools
from xorl.server.api.tool_formats import CallReader, ToolCall, ToolFormat
from xorl.server.context_length import check_context
from xorl.server.operations import AnswerForm, Sample, SampledSequence
from xorl.server.queries import FindServedModel, ServedModel, ServiceInfo
from xorl.server.sample_text import TextStream, sample_text

# A save of a model's weights waits for the model's earlier requests.
_SAVE_TIMEOUT_S = 600.0
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Call:
    """A call whose prompts are tokens.

    tools: the functions that the model may call, and `calls` the format in which it does; None: none.
    """

    api: Api
    kind: Literal["chat.completion", "text_completion"]
    body: ChatBody | CompletionBody
    texts: TokenTexts
    prompts: Sequence[list[int]]
    operations: Sequence[Sample]
    tools: Tools | None = None
    calls: ToolFormat | None = None

    @property
    def is_chat(self) -> bool:
        return self.kind == "chat.completion"

    @property
    def header(self) -> dict[str, JSON]:
        """The first fields of every answer and every chunk, without the id."""
        suffix = ".chunk" if self.is_chat and self.body.stream else ""
        return {"object": self.kind + suffix, "created": int(time.time()), "model": self.body.model}

    @property
    def wants_logprobs(self) -> bool:
        return self.body.logprobs if isinstance(self.body, ChatBody) else self.body.logprobs is not None

    @property
    def reader(self) -> CallReader:
        """A new reader of the calls in one answer."""
        return CallReader(self.calls, {} if self.tools is None else self.tools.schemas)

    def new_call_id(self, name: str, index: int) -> str:
        """An id for a tool call of an answer."""
        assert self.calls is not None, "the answer has a call"
        return self.calls.new_id(name, index)


class Part(NamedTuple):
    """A part of a streamed answer: text that belongs to no tool call, tool calls, and the tokens of all this.

    reason: None before the last part.
    """

    text: str
    calls: Sequence[ToolCall]
    sequence: SampledSequence
    is_first: bool
    reason: FinishReason | None


async def completion_call(api: Api, body: CompletionBody) -> Call:
    """The call of a body of /v1/completions; raises Refusal."""
    info = await api.orchestrator.info()
    with refuse_invalid():
        prompts = body.prompts
        form = answer_form(None, None, read_format(body.response_format))
    encoded = [
        await api.text.encode(info.tokenizer, one, add_special_tokens=body.add_special_tokens)
        if isinstance(one, str)
        else one
        for one in prompts
    ]
    return await _call(api, "text_completion", body, info, encoded, form)


async def chat_call(api: Api, body: ChatBody) -> Call:
    """The call of a body of /v1/chat/completions; raises Refusal."""
    info = await api.orchestrator.info()
    with refuse_invalid():
        messages, asks_for_answer = body.read_messages, body.asks_for_answer
        rendered = [one.for_template(f"messages[{index}]") for index, one in enumerate(messages)]
        tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        answer_schema = read_format(body.response_format)
    calls = await _call_format(api, info, messages, tools)
    with refuse_invalid():
        form = answer_form(tools, calls, answer_schema)
    prompt = await api.text.encode_chat(
        info.tokenizer,
        rendered,
        body.template_variables,
        tools=None if tools is None else tools.definitions,
        asks_for_answer=asks_for_answer,
        continues_last=body.continue_final_message,
    )
    return await _call(api, "chat.completion", body, info, [prompt], form, tools, calls)


async def find_model(api: Api, name: str, *, saves: bool = False) -> ServedModel:
    """Find the model of a name. saves: its current weights are needed, so save them first if necessary."""
    try:
        return await api.orchestrator.ask(FindServedModel(name, saves), ServedModel, timeout_s=_SAVE_TIMEOUT_S)
    except Refusal as refusal:
        code = "model_not_found" if refusal.status == 404 else None
        raise Refusal(refusal.status, refusal.message, code=code, param="model") from None


def read_answer(call: Call, sequence: SampledSequence) -> tuple[str, Sequence[ToolCall], FinishReason]:
    """The text of a sample outside its tool calls, these calls, and why the sample ended."""
    text = sample_text(
        call.texts.decode,
        sequence.tokens.numpy().tolist(),
        call.body.stops,
        is_stopped=sequence.stop_reason == "stop",
        keeps_stop=call.body.include_stop_str_in_output,
    )
    reader = call.reader
    content, calls = reader.add(text, is_last=True)
    return content, calls, _reason(sequence, reader)


async def parts_of(call: Call, operation: Sample) -> AsyncIterator[Part]:
    """The parts of a sample, as soon as they are sampled. operation: of one sample, with a seed and max_tokens."""
    body = call.body
    stream = TextStream(call.texts.decode, body.stops, keeps_stop=body.include_stop_str_in_output)
    reader = call.reader
    num_sampled = 0
    async for part in sample_in_parts(call.api, operation):
        tokens = part.tokens.numpy().tolist()
        is_first, num_sampled = num_sampled == 0, num_sampled + len(tokens)
        is_stopped = part.stop_reason == "stop"
        is_last = is_stopped or num_sampled == operation.max_tokens
        text = stream.add(tokens, is_last=is_last, is_stopped=is_stopped)
        content, calls = reader.add(text, is_last=is_last)
        yield Part(content, calls, part, is_first, _reason(part, reader) if is_last else None)


def _reason(sequence: SampledSequence, reader: CallReader) -> FinishReason:
    return "tool_calls" if reader.calls and sequence.stop_reason == "stop" else sequence.stop_reason


async def _call_format(
    api: Api, info: ServiceInfo, messages: Sequence[ChatMessage], tools: Tools | None
) -> ToolFormat | None:
    """The format of the model's tool calls; None if the request uses no tools. Raises Refusal if it is not known."""
    used = next((f"messages[{index}]" for index, one in enumerate(messages) if one.uses_tools), None)
    if tools is None and used is None:
        return None
    support = await api.text.tool_support(info.tokenizer)
    advice = "describe tools in a message, and read calls in the text of the answer"
    for name, is_served, problem in (
        ("tools", tools is None or support.shows_tools, "does not show tools to the model"),
        ("tools", tools is None or support.calls is not None, "does not write tool calls in a known format"),
        (used, used is None or support.calls is not None, "does not write tool calls in a known format"),
        (used, used is None or support.shows_results, "does not show the results of tool calls to the model"),
    ):
        if not is_served:
            message = f"{name}: the model's chat template {problem}: {advice}"
            raise Refusal(400, message, code="unsupported_parameter", param=name)
    return support.calls


async def _call(
    api: Api,
    kind: Literal["chat.completion", "text_completion"],
    body: ChatBody | CompletionBody,
    info: ServiceInfo,
    prompts: Sequence[list[int]],
    form: AnswerForm | None,
    tools: Tools | None = None,
    calls: ToolFormat | None = None,
) -> Call:
    sampler = (await find_model(api, body.model, saves=True)).sampler
    assert sampler is not None, "its weights have been saved"
    with refuse_invalid():
        prompts = [body.truncated(prompt) for prompt in prompts]
        operations = [body.operation(sampler, prompt, info.vocab_size, form) for prompt in prompts]
        operations = [_within_context(operation, body, info.max_context_length) for operation in operations]
    texts = TokenTexts(
        await api.text.require(info.tokenizer),
        await api.text.token_bytes(info.tokenizer),
        as_ids=body.return_tokens_as_token_ids,
        skips_special=body.skip_special_tokens,
        kept=() if tools is None or calls is None else calls.texts,
    )
    return Call(api, kind, body, texts, prompts, operations, tools, calls)


def _within_context(operation: Sample, body: ChatBody | CompletionBody, limit: int | None) -> Sample:
    """The operation; for a stream, with max_tokens set, as sampling in parts requires (default: fill the context)."""
    if limit is None:
        raise Refusal(503, "the workers have not reported the model's context length yet: retry the request")
    num_prompt = operation.prompt.shape[0]
    check_context(num_prompt, 1 if operation.max_tokens is None else operation.max_tokens, limit)
    if not body.stream or operation.max_tokens is not None:
        return operation
    return replace(operation, max_tokens=limit - num_prompt + 1)
