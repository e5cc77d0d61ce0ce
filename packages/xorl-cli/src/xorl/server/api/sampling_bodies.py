"""Bodies of sampling calls in both dialects, and their conversion to operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from xorl.server.api.data_bodies import NO_STABLE_REINFORCE, ModelInputJson
from xorl.server.api.parameters import read_parameters
from xorl.server.api.responses import InvalidField
from xorl.server.api.tensors import ByteBudget, TensorJson, array_of_json, tokens_array
from xorl.server.identifiers import base_refusal, parse_uri
from xorl.server.operations import (
    BaseSampler,
    CheckpointSampler,
    JsonAnswer,
    NamedSampler,
    Sample,
    SamplerRef,
    SessionSampler,
)

MAX_SAMPLES = 4096
MAX_TOP = 1024
# As in OpenAI's API.
MAX_PENALTY = 2
MAX_BIAS = 100


class SamplingParamsJson(msgspec.Struct, frozen=True):
    """Sampling parameters. stop: a string, a list of strings or a list of token ids; [] also ignores the end token."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: Any = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(msgspec.Struct, frozen=True):
    """The body of /asample."""

    prompt: ModelInputJson
    sampling_params: dict[str, Any] = {}
    num_samples: int = 1
    sampling_session_id: str | None = None
    base_model: str | None = None
    model_path: str | None = None
    seq_id: int | None = None  # unbounded: tinker counts from a random number
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorJson | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    return_routed_experts: bool = False

    def operation(self, vocab_size: int | None, base_names: Sequence[str], budget: ByteBudget) -> Sample:
        """The operation, validated; raises ValueError. base_names: the names of the served base."""
        if (refusal := base_refusal(self.base_model, base_names, "samples from")) is not None:
            raise ValueError(refusal)
        if self.sampling_session_id is not None and self.model_path is not None:
            raise ValueError("sampling_session_id and model_path both choose the weights: send one of them")
        if self.record_stability_info:
            raise ValueError(f"record_stability_info: {NO_STABLE_REINFORCE}")
        prompt = self.prompt.tokens(vocab_size, "prompt")
        last = self.prompt_logprobs_last_n
        if last is not None and not (self.prompt_logprobs and 1 <= last < prompt.shape[0]):
            limits = f"must be 1 to {prompt.shape[0] - 1}, fewer than the prompt's tokens; got {last}"
            raise InvalidField("prompt_logprobs_last_n", f"needs prompt_logprobs and {limits}")
        targets = None
        if self.target_prompt_logprobs is not None:
            targets = array_of_json(self.target_prompt_logprobs, budget, "target_prompt_logprobs")
            if targets.dtype != "int64" or len(targets.shape) != 2 or targets.shape[0] != prompt.shape[0] - 1:
                raise ValueError(
                    f"target_prompt_logprobs must be int64 [{prompt.shape[0] - 1}, K], a row for each token of the "
                    f"prompt but the first; got {targets.dtype} {list(targets.shape)}"
                )
        params = read_parameters(self.sampling_params, SamplingParamsJson, "sampling_params")
        strings, ids, ignore_end = parse_stop(params.stop)
        tokens_array(ids, vocab_size, "stop")
        return validated(
            Sample(
                self._sampler(),
                prompt,
                num_samples=self.num_samples,
                max_tokens=params.max_tokens,
                temperature=params.temperature,
                top_k=None if params.top_k in (-1, 0) else params.top_k,
                top_p=params.top_p,
                seed=params.seed,
                stop_strings=strings,
                stop_ids=ids,
                ignore_end=ignore_end,
                prompt_logprobs=bool(self.prompt_logprobs),
                topk_prompt_logprobs=self.topk_prompt_logprobs,
                topk_sample_logprobs=self.topk_sample_logprobs,
                num_prompt_scored=last,
                prompt_draws=self.prompt_alt_tokens_k,
                target_prompt_tokens=targets,
                routed_experts=self.return_routed_experts,
            ),
            {"prompt_draws": "prompt_alt_tokens_k", "stop_strings": "stop"},
        )

    def _sampler(self) -> SamplerRef:
        if self.sampling_session_id is not None:
            return SessionSampler(self.sampling_session_id)
        if self.model_path is not None:
            return CheckpointSampler(parse_uri(self.model_path))
        return BaseSampler()


class GenerateParamsJson(msgspec.Struct, frozen=True):
    """The sampling_params of /generate."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n: int = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    sampling_seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    json_schema: str | None = None
    min_p: float = 0.0
    min_new_tokens: int = 0
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    stop_regex: str | list[str] | None = None
    custom_params: dict[str, Any] | None = None
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # has no effect: only tokenizers without a tokenizer.json have it
    stream_interval: int | None = None  # has no effect: answers are not streamed

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


# Only the defaults of these fields are supported.
_UNSUPPORTED = ("min_p", "min_new_tokens", "regex", "ebnf", "structural_tag", "stop_regex", "custom_params")


class _Unserved(msgspec.Struct, frozen=True):
    """Fields of an engine's /generate that would change an answer, and that this service refuses."""

    stream: object = None
    input_embeds: object = None
    image_data: object = None
    video_data: object = None
    audio_data: object = None
    token_ids_logprob: object = None
    return_text_in_logprobs: object = None
    return_hidden_states: object = None
    session_params: object = None
    custom_logit_processor: object = None
    lora_id: object = None


class GenerateBody(_Unserved, frozen=True):
    """The body of /generate, in SGLang's format: one prompt, as text or token ids."""

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: dict[str, Any] = {}
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    lora_path: str | None = None
    return_routed_experts: bool = False

    def params(self) -> GenerateParamsJson:
        """The sampling parameters, validated; raises ValueError."""
        params = read_parameters(self.sampling_params, GenerateParamsJson, "sampling_params")
        defaults = GenerateParamsJson()
        for name in _UNSUPPORTED:
            if getattr(params, name) != getattr(defaults, name):
                raise ValueError(f"sampling_params.{name} is not supported, leave it out")
        return params

    def operation(self, params: GenerateParamsJson, prompt_ids: list[int], vocab_size: int | None) -> Sample:
        """The operation, validated; raises ValueError. prompt_ids: input_ids, or the tokens of `text`."""
        for name in _Unserved.__struct_fields__:
            if getattr(self, name):
                raise ValueError(f"{name} is not supported, leave it out")
        if not prompt_ids:
            raise ValueError("the prompt is empty")
        ids = tuple(params.stop_token_ids or ())
        tokens_array(ids, vocab_size, "stop_token_ids")
        scores_prompt = self.return_logprob and self.logprob_start_len >= 0
        return validated(
            Sample(
                BaseSampler() if self.lora_path is None else NamedSampler(self.lora_path),
                tokens_array(prompt_ids, vocab_size, "input_ids"),
                num_samples=params.n,
                max_tokens=params.max_new_tokens,
                temperature=params.temperature,
                top_k=None if params.top_k in (-1, 0) else params.top_k,
                top_p=params.top_p,
                seed=params.seed if params.sampling_seed is None else params.sampling_seed,
                stop_strings=params.stops,
                stop_ids=ids,
                ignore_end=params.ignore_eos,
                prompt_logprobs=scores_prompt,
                topk_prompt_logprobs=self.top_logprobs_num if scores_prompt else 0,
                topk_sample_logprobs=self.top_logprobs_num if self.return_logprob else 0,
                routed_experts=self.return_routed_experts,
                logit_bias=token_biases(params.logit_bias or {}, vocab_size),
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                repetition_penalty=params.repetition_penalty,
                form=None
                if params.json_schema is None
                else JsonAnswer(params.json_schema, "sampling_params.json_schema"),
            ),
            {"num_samples": "n", "max_tokens": "max_new_tokens", "stop_strings": "stop"},
        )


def parse_stop(stop: object) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    """Returns (strings, token ids, whether to ignore the model's end token); raises ValueError."""
    if stop is None:
        return (), (), False
    if isinstance(stop, str):
        return (stop,), (), False
    if isinstance(stop, list):
        strings = tuple(one for one in stop if isinstance(one, str))
        ids = tuple(one for one in stop if isinstance(one, int) and not isinstance(one, bool))
        if len(strings) == len(stop) or len(ids) == len(stop):
            return strings, ids, not stop
    raise ValueError("stop must be a string, a list of strings or a list of token ids")


def token_biases(given: Mapping[str, float], vocab_size: int | None) -> tuple[tuple[int, float], ...]:
    """Pairs of a token id and its bias; raises InvalidField."""
    if invalid := [name for name in given if not name.isdecimal()]:
        raise InvalidField("logit_bias", f"must map token ids to numbers, got the key {invalid[0][:100]!r}")
    if extreme := [name for name, bias in given.items() if not abs(bias) <= MAX_BIAS]:
        requirement = f"must be from -{MAX_BIAS} to {MAX_BIAS} for each token"
        raise InvalidField("logit_bias", f"{requirement}, got {given[extreme[0]]} for token {extreme[0]}")
    ids = [int(name) for name in given]
    tokens_array(ids, vocab_size, "logit_bias")
    return tuple(zip(ids, given.values(), strict=True))


def validated(sample: Sample, names: Mapping[str, str] = MappingProxyType({})) -> Sample:
    """Return `sample`. Raises InvalidField if it is invalid. names: the client's names of fields, where they differ."""
    checks = (
        ("num_samples", 1 <= sample.num_samples <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}"),
        ("max_tokens", sample.max_tokens is None or sample.max_tokens >= 0, "0 or more"),
        ("temperature", math.isfinite(sample.temperature) and sample.temperature >= 0, "finite and 0 or more"),
        ("top_k", sample.top_k is None or sample.top_k >= 1, "1 or more, or -1 for all"),
        ("top_p", 0 < sample.top_p <= 1, "above 0 and at most 1"),
        ("topk_prompt_logprobs", 0 <= sample.topk_prompt_logprobs <= MAX_TOP, f"0 to {MAX_TOP}"),
        ("topk_sample_logprobs", 0 <= sample.topk_sample_logprobs <= MAX_TOP, f"0 to {MAX_TOP}"),
        ("prompt_draws", 0 <= sample.prompt_draws <= MAX_TOP, f"0 to {MAX_TOP}"),
        ("stop_strings", all(sample.stop_strings), "non-empty strings"),
        ("presence_penalty", abs(sample.presence_penalty) <= MAX_PENALTY, f"-{MAX_PENALTY} to {MAX_PENALTY}"),
        ("frequency_penalty", abs(sample.frequency_penalty) <= MAX_PENALTY, f"-{MAX_PENALTY} to {MAX_PENALTY}"),
        (
            "repetition_penalty",
            math.isfinite(sample.repetition_penalty) and sample.repetition_penalty > 0,
            "finite and above 0",
        ),
        ("seed", sample.seed is None or -(2**63) <= sample.seed < 2**63, "a signed 64-bit integer"),
    )
    for name, is_valid, requirement in checks:
        if not is_valid:
            raise InvalidField(names.get(name, name), f"must be {requirement}, got {getattr(sample, name)}")
    if sample.form is not None and sample.ignore_end:
        raise InvalidField(names.get("ignore_end", "ignore_end"), "cannot be combined with a format of the answer")
    scores_prompt = sample.prompt_logprobs or sample.topk_prompt_logprobs or sample.prompt_draws
    if sample.max_tokens == 0 and not (
        scores_prompt or sample.target_prompt_tokens is not None or sample.routed_experts
    ):
        raise ValueError("max_tokens is 0 and the prompt is not scored: request prompt log-probabilities or tokens")
    return sample
