"""Requests to vLLM's completions API for a Sample, and their answers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from xorl.server.endpoints.engine import EngineError
from xorl.server.endpoints.formats import (
    Candidate,
    RequestInterrupted,
    logprobs,
    sampling_params,
    structural_tag,
    tokens,
    top_table,
)
from xorl.server.operations import Sample, SampledSequence, SampleResult, ToolCalls


class _VllmLogprob(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _VllmLogprobs(msgspec.Struct):
    """`logprobs` of a completion: for each position, the token's and those of likely tokens, by `token_id:N`."""

    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _VllmChoice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _VllmLogprobs
    index: int = 0
    finish_reason: str | None = None
    prompt_logprobs: list[dict[str, _VllmLogprob] | None] | None = None


class _VllmAnswer(msgspec.Struct):
    choices: list[_VllmChoice]


def vllm_request(operation: Sample, prompt: Sequence[int], limit: int, model: str) -> dict[str, object]:
    """The body of /v1/completions. vLLM, like this service, uses seed + i for sample i."""
    body: dict[str, object] = {
        "model": model,
        "prompt": list(prompt),
        "n": operation.num_samples,
        "max_tokens": limit,
        **sampling_params(operation),
        "logprobs": operation.topk_sample_logprobs,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }
    if operation.prompt_logprobs or operation.topk_prompt_logprobs:
        body["prompt_logprobs"] = operation.topk_prompt_logprobs
    if operation.seed is not None:
        body["seed"] = operation.seed
    if isinstance(operation.form, ToolCalls):
        body["response_format"] = structural_tag(operation.form)
    elif operation.form is not None:
        schema = {"name": "answer", "schema": msgspec.json.decode(operation.form.schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def vllm_result(operation: Sample, prompt: Sequence[int], answer: object) -> SampleResult:
    """The samples in an answer of /v1/completions.

    Raises EngineError if the answer does not fit the request, and RequestInterrupted if the server ended it early.
    """
    try:
        choices = sorted(msgspec.convert(answer, _VllmAnswer).choices, key=lambda choice: choice.index)
    except msgspec.ValidationError as error:
        raise EngineError(f"/v1/completions: unexpected format of the answer: {error}") from error
    if len(choices) != operation.num_samples:
        raise EngineError(f"/v1/completions: got {len(choices)} samples instead of {operation.num_samples}")
    sequences: list[SampledSequence] = []
    for choice in choices:
        if choice.finish_reason not in ("stop", "length"):
            raise RequestInterrupted(str(choice.finish_reason))
        top = None
        if operation.topk_sample_logprobs:
            rows = [_by_likelihood(row) for row in choice.logprobs.top_logprobs or []]
            top = top_table(rows, operation.topk_sample_logprobs)
        sequences.append(
            SampledSequence(
                tokens=tokens(choice.token_ids),
                logprobs=logprobs(choice.logprobs.token_logprobs),
                stop_reason="length" if choice.finish_reason == "length" else "stop",
                top_logprobs=top,
            )
        )
    returned = choices[0].prompt_logprobs
    wants_prompt = operation.prompt_logprobs or operation.topk_prompt_logprobs
    if wants_prompt and (returned is None or len(returned) != len(prompt)):
        raise EngineError("/v1/completions: log-probabilities of the prompt's tokens are missing")
    rows = [row or {} for row in returned or []]
    prompt_values = [None if not row else row[str(token)].logprob for row, token in zip(rows, prompt, strict=False)]
    likely = [_by_likelihood({f":{token}": each.logprob for token, each in row.items()}) for row in rows[1:]]
    return SampleResult(
        sequences=sequences,
        prompt_logprobs=logprobs(prompt_values) if operation.prompt_logprobs else None,
        topk_prompt_logprobs=top_table(likely, operation.topk_prompt_logprobs)
        if operation.topk_prompt_logprobs
        else None,
    )


def _by_likelihood(row: dict[str, float] | None) -> list[Candidate]:
    """Converts {`token_id:N`: log-probability} to a row in SGLang's format, most likely first."""
    ids = {int(name.rpartition(":")[2]): value for name, value in (row or {}).items()}
    return [(ids[token], token, None) for token in sorted(ids, key=ids.__getitem__, reverse=True)]
