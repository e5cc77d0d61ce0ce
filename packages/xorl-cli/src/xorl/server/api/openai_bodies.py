"""Bodies of the OpenAI-compatible calls, and their conversion to samples."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from xorl.server.api.openai_fields import (
    MESSAGE_IGNORED,
    MESSAGE_UNSERVED,
    PART_IGNORED,
    field_names,
    msgspec_of,
    served_fields,
)
from xorl.server.api.responses import InvalidField
from xorl.server.api.sampling_bodies import parse_stop, token_biases, validated
from xorl.server.api.tensors import tokens_array
from xorl.server.operations import AnswerForm, Sample, SamplerRef

# The default of OpenAI's completions.
COMPLETION_TOKENS = 16
MAX_PROMPTS = 1024
# The names that these calls use for fields of a sample.
_NAMES = {
    "num_samples": "n",
    "stop_strings": "stop",
    "topk_prompt_logprobs": "prompt_logprobs",
    "ignore_end": "ignore_eos",
}


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_usage: end the stream with a chunk that has the token counts. include_obfuscation has no effect."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both calls share. Those from repetition_penalty on are extensions that other servers also have.

    prompt_logprobs: how many of the most likely tokens to return at each position of the prompt, besides its own token.
    """

    model: str
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: dict[str, Any] | None = None
    logit_bias: dict[str, float] = {}
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_k: int = -1
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = True
    return_routed_experts: bool = False
    request_id: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt are part of the answer."""
        return self.prompt_logprobs is not None

    def truncated(self, prompt: list[int]) -> list[int]:
        """The prompt, cut to its last tokens if it is longer than the body allows; raises InvalidField."""
        limit = self.truncate_prompt_tokens
        if limit is None:
            return prompt
        if limit < 1:
            raise InvalidField("truncate_prompt_tokens", f"must be 1 or more, got {limit}")
        return prompt[-limit:]

    def sample(
        self,
        sampler: SamplerRef,
        prompt: Sequence[int],
        vocab_size: int,
        max_tokens: int | None,
        num_top: int,
        form: AnswerForm | None,
    ) -> Sample:
        """The operation for one prompt, validated; raises ValueError. num_top: the most likely tokens to return."""
        for name in ("prompt_logprobs", "return_routed_experts"):
            if self.stream and getattr(self, name):
                raise InvalidField(name, "cannot be combined with stream: leave one of them out")
        if self.prompt_logprobs is not None and self.prompt_logprobs < 0:
            raise InvalidField("prompt_logprobs", f"must be 0 or more, got {self.prompt_logprobs}")
        strings, _, _ = parse_stop(list(self.stops) or None)
        tokens_array(self.stop_token_ids, vocab_size, "stop_token_ids")
        return validated(
            Sample(
                sampler,
                tokens_array(prompt, vocab_size, "prompt"),
                num_samples=self.n,
                max_tokens=max_tokens,
                temperature=self.temperature,
                top_k=None if self.top_k in (-1, 0) else self.top_k,
                top_p=self.top_p,
                seed=secrets.randbits(62) if self.seed is None else self.seed,
                stop_strings=strings,
                stop_ids=tuple(self.stop_token_ids),
                ignore_end=self.ignore_eos,
                prompt_logprobs=self.scores_prompt,
                topk_prompt_logprobs=max(self.prompt_logprobs or 0, num_top if self.scores_prompt else 0),
                topk_sample_logprobs=num_top,
                routed_experts=self.return_routed_experts,
                logit_bias=token_biases(self.logit_bias, vocab_size),
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                form=form,
            ),
            {**_NAMES, "topk_sample_logprobs": "logprobs" if isinstance(self, CompletionBody) else "top_logprobs"},
        )


class CompletionBody(SamplingBody, frozen=True, kw_only=True):
    """The body of /v1/completions. prompt: text or token ids, or a list of either."""

    prompt: str | list[Any]
    max_tokens: int = COMPLETION_TOKENS
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True

    @property
    def scores_prompt(self) -> bool:
        return self.echo or self.prompt_logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts. Raises ValueError if there are none or too many."""
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not 1 <= len(given) <= MAX_PROMPTS or not all(one and _is_prompt(one) for one in given):
            raise InvalidField("prompt", f"must be 1 to {MAX_PROMPTS} texts or lists of token ids, none of them empty")
        return given

    def operation(self, sampler: SamplerRef, prompt: Sequence[int], vocab_size: int, form: AnswerForm | None) -> Sample:
        """The operation for one of the prompts, validated; raises ValueError."""
        if self.best_of not in (None, self.n):
            raise InvalidField("best_of", "may only be n: request n samples and choose", "unsupported_parameter")
        if self.echo and self.stream:
            raise InvalidField("echo", "cannot be combined with stream: leave one of them out")
        return self.sample(sampler, prompt, vocab_size, self.max_tokens, self.logprobs or 0, form)


def _is_prompt(given: object) -> bool:
    is_ids = isinstance(given, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in given)
    return is_ids or isinstance(given, str)


class CalledJson(msgspec.Struct, frozen=True):
    """The function of a call. arguments: a JSON object, as text or as it is."""

    name: str
    arguments: str | dict[str, Any] = ""

    def for_template(self, where: str) -> dict[str, object]:
        """The function as templates expect it; raises InvalidField."""
        arguments: object = self.arguments or {}
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments)
            except msgspec.DecodeError:
                arguments = None
        if not isinstance(arguments, dict):
            raise InvalidField(f"{where}.arguments", "must be a JSON object")
        return {"name": self.name, "arguments": arguments}


class CallJson(msgspec.Struct, frozen=True):
    """A tool call in a message."""

    function: CalledJson
    id: str = ""
    type: Literal["function"] = "function"

    def for_template(self, where: str) -> dict[str, object]:
        """The call as templates expect it; raises InvalidField."""
        return {"id": self.id, "type": "function", "function": self.function.for_template(f"{where}.function")}


class ChatMessage(msgspec.Struct, frozen=True):
    """A message. content: text, or a list of text parts. reasoning is a synonym of reasoning_content."""

    role: str
    content: str | list[dict[str, Any]] = ""
    name: str | None = None
    tool_calls: list[CallJson] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @classmethod
    def of(cls, given: dict[str, Any], where: str) -> ChatMessage:
        """A message in a request; raises InvalidField. where: its place in the body."""
        known = served_fields(given, field_names(cls), MESSAGE_IGNORED, MESSAGE_UNSERVED, f"{where}.")
        message = msgspec_of(known, cls, f"{where}.")
        if message.role == "function":
            raise InvalidField(f"{where}.role", "must not be function: use tool, with tool_call_id")
        if message.tool_calls and message.role != "assistant":
            raise InvalidField(f"{where}.tool_calls", "belongs to messages of the assistant")
        return message

    @property
    def uses_tools(self) -> bool:
        """Whether the message has calls, or a result of one."""
        return self.role == "tool" or bool(self.tool_calls)

    def for_template(self, where: str) -> dict[str, object]:
        """The message as templates expect it; raises InvalidField."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(_part_text(part, f"{where}.content[{index}]") for index, part in enumerate(content))
        found: dict[str, object] = {"role": self.role, "content": content}
        if self.name is not None:
            found["name"] = self.name
        reasoning = self.reasoning_content or self.reasoning
        if reasoning is not None:
            found["reasoning_content"] = reasoning
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            found["tool_calls"] = [
                call.for_template(f"{where}.tool_calls[{index}]") for index, call in enumerate(self.tool_calls)
            ]
        return found


def _part_text(part: dict[str, Any], where: str) -> str:
    known = served_fields(part, {"type", "text"}, PART_IGNORED, {}, f"{where}.") if part.get("type") == "text" else {}
    if not isinstance(known.get("text"), str):
        raise InvalidField(where, "must be of type text, others are not supported")
    return known["text"]


class ChatBody(SamplingBody, frozen=True, kw_only=True):
    """The body of /v1/chat/completions.

    continue_final_message: the prompt ends within the last message. chat_template_kwargs: variables of the model's chat
    template; reasoning_effort is one.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None

    @property
    def read_messages(self) -> list[ChatMessage]:
        """The messages; raises InvalidField."""
        if not self.messages:
            raise InvalidField("messages", "must have at least one message")
        return [ChatMessage.of(one, f"messages[{index}]") for index, one in enumerate(self.messages)]

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template that the client sets."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **self.chat_template_kwargs}

    @property
    def asks_for_answer(self) -> bool:
        """Whether the prompt ends with the template's prompt for an answer; raises InvalidField."""
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidField("continue_final_message", "cannot be combined with add_generation_prompt: true")
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    def operation(self, sampler: SamplerRef, prompt: Sequence[int], vocab_size: int, form: AnswerForm | None) -> Sample:
        """The operation, validated; raises ValueError. prompt: the tokens of the messages."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidField("top_logprobs", "needs logprobs: true")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sample(sampler, prompt, vocab_size, limit, self.top_logprobs, form)
