"""Sampling from an inference server instead of the workers."""

from __future__ import annotations

from pathlib import Path

from xorl.server.endpoint_queries import EndpointState
from xorl.server.endpoints.engine import EngineError, InferenceEngine
from xorl.server.endpoints.formats import RequestInterrupted, UnexpectedWeights
from xorl.server.endpoints.registry import FIRST_VERSION, EndpointRegistry
from xorl.server.endpoints.sglang import sglang_request, sglang_result
from xorl.server.endpoints.vllm import vllm_request, vllm_result
from xorl.server.operations import Sample, SampleResult

SAMPLE_TIMEOUT_S = 3600.0


async def sample_from_endpoint(
    registry: EndpointRegistry,
    operation: Sample,
    *,
    version: str | None,
    context_length: int | None,
    adapter: tuple[str, Path] | None = None,
) -> SampleResult | None:
    """The samples, or None if no endpoint has these weights or supports the request; the workers then sample.

    If an endpoint does not answer, or interrupts the request because its weights change, the next one is tried.
    Raises EngineError if an endpoint refuses the request.

    version: the version of the full weights; None: the weights that the endpoints started with.
    context_length: of the model; None if unknown.
    adapter: the adapter's name, which must include its version, and the folder with its files in PEFT's format.
    """
    if _refusal(operation, context_length) is not None:
        return None
    for _ in registry.states:
        state = registry.next_for_sampling(version)
        if state is None:
            return None
        try:
            if adapter is not None:
                await registry.load_adapter(state, *adapter)
            engine, name = registry.engine(state.endpoint), None if adapter is None else adapter[0]
            return await _sample(engine, state, operation, context_length, name)
        except RequestInterrupted:
            continue
        except UnexpectedWeights as problem:
            registry.note_unexpected_weights(state.endpoint, problem.version)
        except EngineError as problem:
            registry.forget_adapters(state.endpoint)
            if not problem.is_gone:
                raise
            registry.note_unreachable(state.endpoint, str(problem))
    return None


async def _sample(
    engine: InferenceEngine, state: EndpointState, operation: Sample, context_length: int | None, adapter: str | None
) -> SampleResult:
    prompt = [int(token) for token in operation.prompt.numpy()]
    limit = operation.max_tokens
    if limit is None:
        assert context_length is not None, "checked by `_refusal`"
        limit = context_length - len(prompt)
    if state.server_info.get("kind") == "vllm":
        name = adapter or state.server_info.get("served_model_name")
        body = vllm_request(operation, prompt, limit, str(name))
        answer = await engine.request("POST", "/v1/completions", body, timeout_s=SAMPLE_TIMEOUT_S)
        return vllm_result(operation, prompt, answer)
    body = sglang_request(operation, prompt, limit, adapter)
    answer = await engine.request("POST", "/generate", body, timeout_s=SAMPLE_TIMEOUT_S)
    return sglang_result(operation, prompt, answer, state.weight_version or FIRST_VERSION)


def _refusal(operation: Sample, context_length: int | None) -> str | None:
    """Why endpoints do not support a request, or None if they do."""
    if operation.target_prompt_tokens is not None:
        return "target_prompt_tokens: engines accept only one list of tokens for all positions"
    if operation.prompt_draws or operation.num_prompt_scored is not None:
        return "prompt_draws, num_prompt_scored: engines neither draw alternatives nor score only a prompt's end"
    if operation.num_continued:
        return "num_continued: engines have random numbers of their own, which cannot be continued"
    if operation.routed_experts:
        return "routed_experts: the workers record them"
    if operation.max_tokens is None and context_length is None:
        return "max_tokens: required if the model's context length is unknown"
    if operation.max_tokens == 0:
        return "max_tokens: engines generate at least one token"
    num_tokens = operation.prompt.shape[0] + (operation.max_tokens or 1)
    if context_length is not None and num_tokens > context_length:
        return "context length: engines, unlike the workers, also need room for a sample's last token"
    return None
