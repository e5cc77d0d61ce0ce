"""Routes for sampling: sampling sessions, asample (polled), and /generate in SGLang's format (answered directly)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from xorl.server.api.context import OrderedOperation, api_of, future_response
from xorl.server.api.gate import decode
from xorl.server.api.model_bodies import checkpoint_of
from xorl.server.api.responses import JSON, Refusal, json_response, refuse_invalid
from xorl.server.api.results import likely_tokens
from xorl.server.api.routed_experts import record_base64
from xorl.server.api.sampling_bodies import GenerateBody, GenerateParamsJson, SampleBody
from xorl.server.api.sampling_calls import sample, while_connected
from xorl.server.api.tensors import ByteBudget
from xorl.server.datum import Array
from xorl.server.identifiers import SeqId, sampling_session_id_of
from xorl.server.operations import SampledSequence, SampleResult, TopLogprobs
from xorl.server.queries import CreateSamplingSession, GetSampler, SamplingSession, ServiceInfo
from xorl.server.sample_text import sample_text

router = APIRouter()

# The empty sample in the answer to a request that only scores the prompt.
_NOTHING_SAMPLED = SampledSequence(Array.of(np.zeros(0, np.int32)), Array.of(np.zeros(0, np.float32)), "length")


class SamplingSessionBody(msgspec.Struct, frozen=True):
    """The body of /create_sampling_session."""

    session_id: str | None = None
    sampling_session_seq_id: SeqId | None = None
    base_model: str | None = None
    model_path: str | None = None
    model_id: str | None = None


@router.post("/api/v1/create_sampling_session")
async def create_sampling_session(request: Request) -> Response:
    """Create a session to sample from a checkpoint or from the base."""
    api = api_of(request)
    given = await api.bodies.parse(request, SamplingSessionBody)
    with refuse_invalid():
        checkpoint = None if given.model_path is None else checkpoint_of(given.model_path, given.model_id)
    session_id = None
    if given.session_id is not None and given.sampling_session_seq_id is not None:
        session_id = sampling_session_id_of(given.session_id, given.sampling_session_seq_id)
    query = CreateSamplingSession(session_id, given.session_id, given.base_model, checkpoint)
    session = await api.orchestrator.ask(query, SamplingSession)
    return json_response(
        {
            "type": "create_sampling_session",
            "sampling_session_id": session.sampling_session_id,
            "success": True,
            "model_path": given.model_path,
            "lora_name": session.name or "",
            "message": "this service samples itself: call /generate at its address",
        }
    )


@router.get("/api/v1/samplers/{sampling_session_id}")
async def get_sampler(request: Request, sampling_session_id: str) -> Response:
    """Describe a sampling session."""
    session = await api_of(request).orchestrator.ask(GetSampler(sampling_session_id), SamplingSession)
    return json_response(
        {
            "sampler_id": session.sampling_session_id,
            "base_model": session.base_model,
            "model_path": session.checkpoint.uri("tinker") if session.checkpoint and session.name else None,
        }
    )


@router.post("/api/v1/asample")
async def asample(request: Request) -> Response:
    """Submit a request for samples; the client polls for the result."""
    budget = ByteBudget(api_of(request).settings.body_bytes)

    def read(body: bytes, info: ServiceInfo) -> OrderedOperation:
        given = decode(body, SampleBody)
        key = None
        if given.sampling_session_id is not None and given.seq_id is not None:
            key = f"sample/{given.sampling_session_id}/{given.seq_id}"
        return OrderedOperation(given.operation(info.vocab_size, info.base_names, budget), key=key)

    return await future_response(request, read)


@router.post("/generate")
async def generate(request: Request) -> Response:
    """Return samples in SGLang's format when they are finished: a dict, or a list of dicts if n > 1."""
    api = api_of(request)
    given = await api.bodies.parse(request, GenerateBody)
    info = await api.orchestrator.info()
    if (given.text is None) == (given.input_ids is None):
        raise Refusal(400, "the body must have either text or input_ids")
    ids = given.input_ids or await api.text.encode(info.tokenizer, given.text or "")
    with refuse_invalid():
        params = given.params()
        operation = given.operation(params, ids, info.vocab_size)
    request_id, result = await while_connected(request, sample(api, operation))
    sequences = result.sequences or [_NOTHING_SAMPLED] * params.n
    decode = await api.text.decoder(info.tokenizer, skip_special_tokens=params.skip_special_tokens)
    answers = [
        _generated(f"{request_id}:{index}", sequence, _text(sequence, params, decode), given, ids, result)
        for index, sequence in enumerate(sequences)
    ]
    return json_response(answers[0] if params.n == 1 else answers)


def _text(
    sequence: SampledSequence, params: GenerateParamsJson, decode: Callable[[list[int]], str] | None
) -> str | None:
    """The text of a sample. None without a tokenizer: clients may need only the ids."""
    if decode is None:
        return None
    is_stopped, keeps_stop = sequence.stop_reason == "stop", params.no_stop_trim
    tokens = sequence.tokens.numpy().tolist()
    return sample_text(decode, tokens, params.stops, is_stopped=is_stopped, keeps_stop=keeps_stop)


def _generated(
    name: str, sequence: SampledSequence, text: str | None, given: GenerateBody, prompt: list[int], result: SampleResult
) -> dict[str, JSON]:
    tokens = sequence.tokens.numpy().tolist()
    meta: dict[str, JSON] = {
        "id": name,
        "finish_reason": {"type": sequence.stop_reason, "length": len(tokens)},
        "prompt_tokens": len(prompt),
        "completion_tokens": len(tokens),
        "cached_tokens": result.num_cached_tokens,
    }
    if tokens:
        meta["weight_version"] = str(sequence.versions[1])
    if given.return_logprob:
        meta["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(sequence.logprobs.numpy().tolist(), tokens, strict=True)
        ]
        if sequence.top_logprobs is not None:
            meta["output_top_logprobs"] = _top_rows(sequence.top_logprobs)
        if result.prompt_logprobs is not None:
            start = max(given.logprob_start_len, 0)
            logprobs = result.prompt_logprobs.numpy().tolist()
            pairs = zip([None, *logprobs[1:]], prompt, strict=True)
            meta["input_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs][start:]
            if result.topk_prompt_logprobs is not None:
                meta["input_top_logprobs"] = [None, *_top_rows(result.topk_prompt_logprobs)][start:]
    if given.return_routed_experts:
        meta["routed_experts"] = record_base64(result.prompt_routed_experts, sequence.routed_experts)
    return {"text": text, "output_ids": tokens, "meta_info": meta}


def _top_rows(top: TopLogprobs) -> list[JSON]:
    return [[[logprob, token, None] for token, logprob in row] for row in likely_tokens(top)]
