"""Bodies of the OpenAI-compatible calls, and their conversion to samples."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from xorl.server.api.sampling_bodies import parse_stop, validated
from xorl.server.api.tensors import tokens_array
from xorl.server.operations import Sample, SamplerRef

# The default of OpenAI's completions.
COMPLETION_TOKENS = 16
MAX_PROMPTS = 1024


class StreamOptions(msgspec.Struct, frozen=True):
    """include_usage: end the stream with a chunk that has the numbers of tokens."""

    include_usage: bool = False


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True):
    """What both calls share. top_k, stop_token_ids and ignore_eos are extensions that other servers have, too."""

    model: str
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int = -1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Only these values of what follows are supported.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, which are not part of the text of an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sample(
        self,
        sampler: SamplerRef,
        prompt: Sequence[int],
        vocab_size: int,
        max_tokens: int | None,
        *,
        num_top: int,
        scores_prompt: bool = False,
    ) -> Sample:
        """The operation for one prompt, validated; raises ValueError. num_top: the most likely tokens to return."""
        self._refuse_unsupported()
        strings, _, _ = parse_stop(self.stop or None)
        tokens_array(self.stop_token_ids, vocab_size, "stop_token_ids")
        return validated(
            Sample(
                sampler,
                tokens_array(prompt, vocab_size, "prompt"),
                num_samples=self.n,
                max_tokens=max_tokens,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_k=None if self.top_k in (-1, 0) else self.top_k,
                top_p=1.0 if self.top_p is None else self.top_p,
                seed=secrets.randbits(62) if self.seed is None else self.seed,
                stop_strings=strings,
                stop_ids=tuple(self.stop_token_ids),
                ignore_end=self.ignore_eos,
                prompt_logprobs=scores_prompt,
                topk_prompt_logprobs=num_top if scores_prompt else 0,
                topk_sample_logprobs=num_top,
            )
        )

    def _refuse_unsupported(self) -> None:
        neutral: dict[str, object] = {
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "repetition_penalty": 1,
            "min_p": 0,
        }
        for name, value in neutral.items():
            if getattr(self, name) not in (None, value):
                raise ValueError(f"{name} is not supported, leave it out")
        if self.logit_bias:
            raise ValueError("logit_bias is not supported, leave it out")
        if self.response_format not in (None, {"type": "text"}):
            raise ValueError("response_format: only text is supported, leave it out")


class CompletionBody(SamplingBody, frozen=True, kw_only=True):
    """The body of /v1/completions. prompt: text or token ids, or a list of either."""

    prompt: str | list[Any]
    max_tokens: int | None = COMPLETION_TOKENS
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts. Raises ValueError if there are none or too many."""
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not 1 <= len(given) <= MAX_PROMPTS or not all(one and _is_prompt(one) for one in given):
            raise ValueError(f"prompt must be 1 to {MAX_PROMPTS} texts or lists of token ids, none of them empty")
        return given

    def operation(self, sampler: SamplerRef, prompt: Sequence[int], vocab_size: int) -> Sample:
        """The operation for one of the prompts, validated; raises ValueError."""
        if self.best_of not in (None, self.n) or self.suffix is not None:
            raise ValueError("best_of and suffix are not supported, leave them out")
        if self.echo and self.stream:
            raise ValueError("echo cannot be combined with stream, leave one of them out")
        num_top = self.logprobs or 0
        return self.sample(sampler, prompt, vocab_size, self.max_tokens, num_top=num_top, scores_prompt=self.echo)


def _is_prompt(given: object) -> bool:
    is_ids = isinstance(given, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in given)
    return is_ids or isinstance(given, str)


class ChatMessage(msgspec.Struct, frozen=True):
    """A message. content: text, or a list of parts of which each is text."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None

    def for_template(self) -> dict[str, object]:
        """The message as templates expect it; raises ValueError."""
        if self.tool_calls or self.role == "tool":
            raise ValueError("messages: calls of tools are not supported")
        content = self.content
        if not isinstance(content, str):
            parts = content or []
            if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in parts):
                raise ValueError("messages: only parts of type text are supported")
            content = "".join(part["text"] for part in parts)
        found: dict[str, object] = {"role": self.role, "content": content}
        if self.name is not None:
            found["name"] = self.name
        if self.reasoning_content is not None:
            found["reasoning_content"] = self.reasoning_content
        return found


class ChatBody(SamplingBody, frozen=True, kw_only=True):
    """The body of /v1/chat/completions. chat_template_kwargs: variables of the model's chat template."""

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    def operation(self, sampler: SamplerRef, prompt: Sequence[int], vocab_size: int) -> Sample:
        """The operation, validated; raises ValueError. prompt: the tokens of the messages."""
        if self.tools or self.functions:
            raise ValueError("tools are not supported: describe them in a message, and read the calls in the text")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sample(sampler, prompt, vocab_size, limit, num_top=self.top_logprobs or 0)
