"""Requests to SGLang for a Sample, and their answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from xorl.server.datum import Array
from xorl.server.endpoints.engine import EngineError
from xorl.server.endpoints.formats import (
    Candidate,
    RequestInterrupted,
    UnexpectedWeights,
    logprobs,
    sampling_params,
    structural_tag,
    tokens,
    top_table,
)
from xorl.server.operations import AnswerForm, Sample, SampledSequence, SampleResult, ToolCalls


class _Meta(msgspec.Struct):
    """`meta_info` of SGLang. A token is [log-probability, id, text]."""

    finish_reason: dict[str, Any] | None = None
    output_token_logprobs: list[Candidate] = []
    output_top_logprobs: list[list[Candidate] | None] | None = None
    input_token_logprobs: list[Candidate] | None = None
    input_top_logprobs: list[list[Candidate] | None] | None = None
    cached_tokens: int = 0
    weight_version: str | None = None


class _Generated(msgspec.Struct):
    """One answer of SGLang's /generate."""

    output_ids: list[int]
    meta_info: _Meta


def sglang_request(operation: Sample, prompt: Sequence[int], limit: int, adapter: str | None) -> dict[str, object]:
    """The body of /generate. It repeats the prompt for each sample, since each sample has its own seed."""
    params: list[dict[str, object]] = []
    for index in range(operation.num_samples):
        seed = {} if operation.seed is None else {"sampling_seed": operation.seed + index}
        params.append({"max_new_tokens": limit, **sampling_params(operation), **_form(operation.form), **seed})
    wants_prompt = operation.prompt_logprobs or operation.topk_prompt_logprobs > 0
    num_top = max(operation.topk_sample_logprobs, operation.topk_prompt_logprobs)
    body: dict[str, object] = {
        "input_ids": [list(prompt)] * operation.num_samples,
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": 0 if wants_prompt else -1,
        "top_logprobs_num": num_top,
    }
    if adapter is not None:
        body["lora_path"] = [adapter] * operation.num_samples
    return body


def _form(form: AnswerForm | None) -> dict[str, object]:
    if isinstance(form, ToolCalls):
        return {"structural_tag": json.dumps(structural_tag(form))}
    return {} if form is None else {"json_schema": form.schema}


def sglang_result(operation: Sample, prompt: Sequence[int], answer: object, version: str) -> SampleResult:
    """The samples in an answer of /generate.

    Raises EngineError if the answer does not fit the request, UnexpectedWeights if it was computed with another version
    of the weights, and RequestInterrupted if the server ended the request early.
    """
    try:
        generated = msgspec.convert(answer if isinstance(answer, list) else [answer], list[_Generated])
    except msgspec.ValidationError as error:
        raise EngineError(f"/generate: unexpected format of the answer: {error}") from error
    if len(generated) != operation.num_samples:
        raise EngineError(f"/generate: got {len(generated)} samples instead of {operation.num_samples}")
    sequences = [_sequence(one, operation.topk_sample_logprobs, version) for one in generated]
    # The prompt's values are the same for all samples.
    meta, num_top = generated[0].meta_info, operation.topk_prompt_logprobs
    return SampleResult(
        sequences=sequences,
        prompt_logprobs=_prompt_logprobs(meta, len(prompt)) if operation.prompt_logprobs else None,
        topk_prompt_logprobs=top_table((meta.input_top_logprobs or [])[1:], num_top) if num_top else None,
        num_cached_tokens=meta.cached_tokens,
    )


def _sequence(one: _Generated, num_top: int, version: str) -> SampledSequence:
    meta = one.meta_info
    if meta.weight_version not in (None, version):
        raise UnexpectedWeights(meta.weight_version)
    reason = (meta.finish_reason or {}).get("type")
    if reason not in ("stop", "length"):
        raise RequestInterrupted(str(meta.finish_reason))
    if [token for _, token, _ in meta.output_token_logprobs] != one.output_ids:
        raise EngineError("/generate: the log-probabilities do not belong to the returned tokens")
    return SampledSequence(
        tokens=tokens(one.output_ids),
        logprobs=logprobs([value for value, _, _ in meta.output_token_logprobs]),
        stop_reason="length" if reason == "length" else "stop",
        top_logprobs=top_table(meta.output_top_logprobs or [], num_top) if num_top else None,
    )


def _prompt_logprobs(meta: _Meta, prompt_len: int) -> Array:
    rows = meta.input_token_logprobs or []
    if len(rows) != prompt_len:
        raise EngineError(f"/generate: got {len(rows)} log-probabilities for a prompt of {prompt_len} tokens")
    return logprobs([None, *(value for value, _, _ in rows[1:])])
