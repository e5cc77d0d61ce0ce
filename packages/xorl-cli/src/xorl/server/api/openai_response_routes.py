"""The route /v1/responses, answered at once or as a stream of events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from xorl.server.api.context import api_of
from xorl.server.api.gate import SMALL_BYTES, decode
from xorl.server.api.openai_answers import chat_logprobs, rows_of
from xorl.server.api.openai_calls import Call, FinishReason, chat_call, parts_of, read_answer
from xorl.server.api.openai_responses import (
    Conversations,
    OutputItem,
    ResponseBody,
    answer_message,
    in_terms_of_responses,
)
from xorl.server.api.responses import JSON, Refusal, json_response, openai_error, refuse_invalid
from xorl.server.api.sampling_calls import event_stream, sample, while_connected
from xorl.server.api.tool_formats import ToolCall
from xorl.server.operations import SampledSequence

router = APIRouter(prefix="/v1")

_encode = msgspec.json.Encoder().encode


@router.post("/responses")
async def responses(request: Request) -> Response:
    """Answer an input that may continue an earlier answer."""
    api = api_of(request)
    given = decode(await api.bodies.read(request, SMALL_BYTES), dict[str, Any])
    with refuse_invalid():
        body = ResponseBody.of(given)
    earlier = [] if body.previous_response_id is None else api.conversations.get(body.previous_response_id)
    with refuse_invalid():
        chat = body.chat(earlier)
    with in_terms_of_responses():
        answer = _Answer(body, earlier, await chat_call(api, chat), api.conversations)
        if body.stream:
            return await event_stream(request, answer.events())
        _, result = await while_connected(request, sample(api, answer.call.operations[0]))
    (sequence,) = result.sequences
    text, calls, reason = read_answer(answer.call, sequence)
    answer.add(text, calls, sequence)
    return json_response(answer.finish(reason, result.num_cached_tokens))


class _Answer:
    """An answer as it grows."""

    def __init__(
        self, body: ResponseBody, earlier: Sequence[dict[str, Any]], call: Call, conversations: Conversations
    ) -> None:
        self.call = call
        self._body = body
        self._earlier = earlier
        self._conversations = conversations
        self._id, self._created = _new_id("resp"), int(time.time())
        self._items: list[OutputItem] = []
        self._tokens: list[int] = []
        self._logprobs: list[JSON] = []
        self._num_events = 0

    def add(
        self, text: str, calls: Sequence[ToolCall], sequence: SampledSequence, *, is_last: bool = True
    ) -> list[OutputItem]:
        """Add a part of the answer; returns its new items."""
        before = len(self._items)
        self._tokens += sequence.tokens.numpy().tolist()
        if self.call.wants_logprobs:
            content = chat_logprobs(rows_of(sequence), self.call.texts)["content"]
            assert isinstance(content, list)
            self._logprobs += content
        if text:
            if not self._items or self._items[-1].is_call:
                self._items.append(self._new_message())
            self._items[-1].content += text
        for made in calls:
            call_id = self.call.new_call_id(made.name, sum(item.is_call for item in self._items))
            self._items.append(OutputItem(_new_id("fc"), made.arguments, made.name, call_id))
        if is_last and not self._items:
            self._items.append(self._new_message())
        return self._items[before:]

    def _new_message(self) -> OutputItem:
        """A message. The first one has the log-probabilities of all tokens."""
        has_message = any(not item.is_call for item in self._items)
        return OutputItem(_new_id("msg"), logprobs=[] if has_message else self._logprobs)

    def finish(self, reason: FinishReason, num_cached: int) -> dict[str, JSON]:
        """The whole answer, which later calls may continue."""
        if self._body.store:
            messages = [*self._earlier, *self._body.messages, answer_message(self._items)]
            self._conversations.add(self._id, messages)
        num_prompt, num_sampled = len(self.call.prompts[0]), len(self._tokens)
        status = "incomplete" if reason == "length" else "completed"
        return {
            **self._head(status),
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "output": [item.json(status if item is self._items[-1] else "completed") for item in self._items],
            "usage": {
                "input_tokens": num_prompt,
                "input_tokens_details": {"cached_tokens": num_cached},
                "output_tokens": num_sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_prompt + num_sampled,
            },
            "prompt_token_ids": self.call.prompts[0],
            "token_ids": self._tokens,
        }

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of a stream. An error ends it, as its last event; raises Refusal if it is the first."""
        (operation,) = self.call.operations
        open_item: OutputItem | None = None
        reason: FinishReason = "stop"
        try:
            async for part in parts_of(self.call, operation):
                if part.is_first:
                    for kind in ("created", "in_progress"):
                        yield self._event(f"response.{kind}", response=self._head("in_progress"))
                reason = part.reason or reason
                new = self.add(part.text, part.calls, part.sequence, is_last=part.reason is not None)
                for item in [one for one in (open_item, *new) if one is not None]:
                    if item is not open_item:
                        for event in self._closing(open_item, "completed"):
                            yield event
                        open_item = item
                        for event in self._opening(item):
                            yield event
                        delta = item.content
                    else:
                        delta = part.text
                    if delta:
                        yield self._delta(item, delta)
        except Refusal as refusal:
            if not self._num_events:
                raise
            error = openai_error(refusal)["error"]
            assert isinstance(error, dict)
            yield self._event("error", code=error["code"], message=refusal.message, param=refusal.param)
            return
        status = "incomplete" if reason == "length" else "completed"
        for event in self._closing(open_item, status):
            yield event
        yield self._event(f"response.{status}", response=self.finish(reason, 0))

    def _opening(self, item: OutputItem) -> list[bytes]:
        place = self._place(item)
        added = self._event("response.output_item.added", **place, item=item.json("in_progress"))
        if item.is_call:
            return [added]
        part = {**item.part, "text": "", "logprobs": []}
        return [added, self._event("response.content_part.added", **place, **_in_message(item), part=part)]

    def _delta(self, item: OutputItem, delta: str) -> bytes:
        place = self._place(item)
        if item.is_call:
            return self._event("response.function_call_arguments.delta", **place, item_id=item.id, delta=delta)
        return self._event("response.output_text.delta", **place, **_in_message(item), delta=delta, logprobs=[])

    def _closing(self, item: OutputItem | None, status: str) -> list[bytes]:
        if item is None:
            return []
        place = self._place(item)
        if item.is_call:
            done = {"item_id": item.id, "name": item.name, "arguments": item.content}
            events = [self._event("response.function_call_arguments.done", **place, **done)]
        else:
            done = {"text": item.content, "logprobs": item.logprobs}
            events = [
                self._event("response.output_text.done", **place, **_in_message(item), **done),
                self._event("response.content_part.done", **place, **_in_message(item), part=item.part),
            ]
        return [*events, self._event("response.output_item.done", **place, item=item.json(status))]

    def _place(self, item: OutputItem) -> dict[str, JSON]:
        return {"output_index": self._items.index(item)}

    def _event(self, kind: str, **content: JSON) -> bytes:
        number = self._num_events
        self._num_events += 1
        data = _encode({"type": kind, "sequence_number": number, **content})
        return f"event: {kind}\ndata: ".encode() + data + b"\n\n"

    def _head(self, status: str) -> dict[str, JSON]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": body.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.get("effort"), "summary": None},
            "store": body.store,
            "temperature": body.temperature,
            "text": {"format": body.text.get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice,
            "tools": body.tools,
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _in_message(item: OutputItem) -> dict[str, JSON]:
    return {"item_id": item.id, "content_index": 0}


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"
