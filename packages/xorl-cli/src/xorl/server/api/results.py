"""Results in the clients' formats: JSON in two dialects, and protobuf. N positions, K tokens at each."""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np
from google.protobuf.message import Message as ProtobufMessage

from xorl.server.api.protobuf import DTYPES, MESSAGES
from xorl.server.api.responses import JSON, Floats
from xorl.server.api.routed_experts import record_json
from xorl.server.datum import Array
from xorl.server.identifiers import Dialect
from xorl.server.operations import (
    NO_LOGPROB,
    ClientResult,
    Failure,
    GradientsAborted,
    Loaded,
    LossResult,
    ModelCreated,
    OptimResult,
    SampledSequence,
    SampleResult,
    Saved,
    SyncResult,
    TopLogprobs,
    Unloaded,
)

# Training loops with tinker log these metrics together with a `step` of their own.
_TINKER_NAMES = {"step": "optimizer_step"}
_STOP_REASONS = {"stop": 0, "length": 1}
_SAVED_TYPES = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}


def result_json(result: ClientResult, dialect: Dialect) -> JSON:
    """The JSON of a result. Only failures have `error`, by which both clients recognize them."""
    match result:
        case Failure():
            return {"error": result.message, "category": result.category, "status": result.status}
        case LossResult():
            return loss_json(result)
        case SampleResult():
            return sample_json(result)
        case ModelCreated():
            # Without `type`: clients expect different types for a new model and one created from a checkpoint.
            return {"model_id": result.model_id, "lora_rank": result.lora_rank, "is_lora": result.lora_rank is not None}
        case Unloaded():
            return {"type": "unload_model", "model_id": result.model_id}
        case OptimResult():
            metrics = result.metrics
            if dialect == "tinker":
                metrics = strict_metrics({_TINKER_NAMES.get(name, name): value for name, value in metrics.items()})
            return {"type": "optim_step", "metrics": metrics, "info": {}}
        case GradientsAborted():
            return {"success": True, "model_id": result.model_id, "step": result.step, "info": {}}
        case Saved():
            return saved_json(result, dialect)
        case Loaded():
            path = result.checkpoint.uri(dialect)
            return {"type": "load_weights", "model_id": result.model_id, "path": path, "step": result.num_steps}
        case SyncResult():
            return sync_json(result)


def loss_json(result: LossResult) -> JSON:
    """One dict of tensors per datum, in order."""
    num_datums = max((len(arrays) for arrays in result.fields.values()), default=0)
    return {
        "loss_fn_output_type": result.loss_fn_output_type,
        "loss_fn_outputs": [
            {name: tensor_json(arrays[index]) for name, arrays in result.fields.items()} for index in range(num_datums)
        ],
        "metrics": result.metrics,
        "info": {},
    }


def strict_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics without NaN and Infinity, which some JSON parsers reject: `{name}_not_finite`: 1 replaces them."""
    return {
        name if math.isfinite(value) else f"{name}_not_finite": value if math.isfinite(value) else 1.0
        for name, value in metrics.items()
    }


def likely_tokens(top: TopLogprobs) -> list[list[tuple[int, float]]]:
    """The (token, log-probability) pairs at each position, without empty cells."""
    rows = zip(top.token_ids.numpy().tolist(), top.logprobs.numpy().tolist(), strict=True)
    return [[cell for cell in zip(*row, strict=True) if cell[1] != NO_LOGPROB] for row in rows]


def tensor_json(array: Array) -> JSON:
    """A tensor as flat values with dtype and shape."""
    dtype = "int64" if array.dtype in ("int16", "int32", "int64") else "float32"
    return {"data": Floats(array.numpy().reshape(-1).tolist()), "dtype": dtype, "shape": list(array.shape)}


def sample_json(result: SampleResult) -> JSON:
    """Samples for clients that do not accept protobuf. The most likely tokens are pairs (id, log-probability).

    routed_experts: of all tokens of prompt and sample but the last, which was not computed.
    """
    prompt = None if result.prompt_logprobs is None else result.prompt_logprobs.numpy().tolist()
    draws = None if result.prompt_draws is None else _draws(result.prompt_draws)
    top_prompt, targets = _top_pairs(result.topk_prompt_logprobs), _target_logprobs(result)
    return {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": sequence.stop_reason,
                "tokens": sequence.tokens.numpy().tolist(),
                "logprobs": sequence.logprobs.numpy().tolist(),
                "topk_logprobs": _top_pairs(sequence.top_logprobs),
                "routed_experts": record_json(result.prompt_routed_experts, sequence.routed_experts),
            }
            for sequence in result.sequences
        ],
        "prompt_logprobs": None if prompt is None else [None if math.isnan(value) else value for value in prompt],
        "topk_prompt_logprobs": None if top_prompt is None else [None, *(pairs or None for pairs in top_prompt)],
        "prompt_alt_tokens": None if draws is None else {name: tensor_json(array) for name, array in draws.items()},
        "target_prompt_logprobs": None if targets is None else tensor_json(targets),
        "prompt_cache_hit_tokens": result.num_cached_tokens,
    }


def saved_json(result: Saved, dialect: Dialect) -> JSON:
    """The checkpoint's path, or the sampling session of weights without a name."""
    if result.sampler_id is not None:
        return {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": result.sampler_id}
    return {
        "type": _SAVED_TYPES[result.checkpoint.kind],
        "path": result.checkpoint.uri(dialect),
        "sampling_session_id": None,
        "size_bytes": result.size_bytes,
    }


def sync_json(result: SyncResult) -> JSON:
    """The outcome of a weight sync."""
    return {
        "success": result.success,
        "message": result.message,
        "transfer_time": result.transfer_time_s,
        "total_bytes": result.total_bytes,
        "num_parameters": result.num_parameters,
        "num_buckets": result.num_buckets,
        "weight_version": result.weight_version,
        "timing_breakdown": result.timing_s,
        "endpoints_synced": [
            {"host": one.host, "port": one.port, "success": one.success, "message": one.message}
            for one in result.endpoints
        ],
    }


def result_protobuf(result: LossResult | SampleResult) -> bytes:
    """The two kinds of results that tinker accepts only as protobuf."""
    message = _loss_message(result) if isinstance(result, LossResult) else _sample_message(result)
    return message.SerializeToString()


def _loss_message(result: LossResult) -> ProtobufMessage:
    """Consecutive datums with the same trailing shapes are batched into one record, with concatenated rows."""
    names = sorted(result.fields)
    num_datums = max((len(result.fields[name]) for name in names), default=0)
    shapes = [[result.fields[name][index].shape[1:] for name in names] for index in range(num_datums)]
    records = []
    for _, group in groupby(range(num_datums), key=lambda index: shapes[index]):
        indices = list(group)
        fields = [
            MESSAGES["NamedBatchedTensor"](key=name, value=_batched([result.fields[name][index] for index in indices]))
            for name in names
        ]
        records.append(
            MESSAGES["ArrayRecord"](type_tag=result.loss_fn_output_type, fields=fields, num_datums=len(indices))
        )
    metrics = [MESSAGES["NamedNumber"](key=name, value=value) for name, value in result.metrics.items()]
    return MESSAGES["ForwardBackwardOutput"](
        loss_fn_output_type=result.loss_fn_output_type, loss_fn_outputs=records, metrics=metrics
    )


def _batched(arrays: list[Array]) -> ProtobufMessage:
    offsets = np.cumsum([0, *(len(array.data) for array in arrays)]).astype("<i8")
    return MESSAGES["BatchedTensor"](
        data=b"".join(array.data for array in arrays),
        offsets=offsets.tobytes(),
        dtype=DTYPES[arrays[0].dtype],
        trailing_shape=arrays[0].shape[1:],
    )


def _sample_message(result: SampleResult) -> ProtobufMessage:
    targets = _target_logprobs(result)
    if targets is not None:
        targets = _tensor_message(targets)
    draws = None if result.prompt_draws is None else _draws(result.prompt_draws)
    if draws is not None:
        draws = MESSAGES["Alternatives"](**{name: _tensor_message(array) for name, array in draws.items()})
    return MESSAGES["SampleResponse"](
        sequences=[_sequence_message(sequence) for sequence in result.sequences],
        prompt_logprobs=b"" if result.prompt_logprobs is None else result.prompt_logprobs.data,
        topk_prompt_logprobs=_top_message(result.topk_prompt_logprobs, pad_first=True),
        prompt_cache_hit_tokens=result.num_cached_tokens,
        target_prompt_logprobs=targets,
        prompt_alt_tokens=draws,
    )


def _tensor_message(array: Array) -> ProtobufMessage:
    return MESSAGES["Tensor"](dense=array.data, dtype=DTYPES[array.dtype], shape=array.shape)


def _draws(draws: TopLogprobs) -> dict[str, Array]:
    """Alternative tokens drawn for the prompt, in the form that clients expect."""
    return {"tokens": Array.of(draws.token_ids.numpy().astype(np.int64)), "logprobs": draws.logprobs}


def _target_logprobs(result: SampleResult) -> Array | None:
    """The log-probabilities of the target tokens, fp32; 0 where nothing was scored, as clients expect."""
    if result.target_prompt_logprobs is None:
        return None
    return Array.of(np.nan_to_num(result.target_prompt_logprobs.numpy().astype(np.float32), nan=0.0))


def _top_pairs(top: TopLogprobs | None) -> list[JSON] | None:
    return None if top is None else [list(row) for row in likely_tokens(top)]


def _sequence_message(sequence: SampledSequence) -> ProtobufMessage:
    return MESSAGES["SampledSequence"](
        stop_reason=_STOP_REASONS[sequence.stop_reason],
        tokens=sequence.tokens.data,
        logprobs=sequence.logprobs.data,
        topk_sampled_logprobs=_top_message(sequence.top_logprobs, pad_first=False),
    )


def _top_message(top: TopLogprobs | None, *, pad_first: bool) -> ProtobufMessage | None:
    """Tables [N, K]. pad_first: prepend a row of empty cells, since tinker expects one for the prompt's first token."""
    if top is None or not math.prod(top.token_ids.shape):
        return None
    ids, logprobs = top.token_ids.numpy().astype("<i4"), top.logprobs.numpy().astype("<f4")
    if pad_first:
        ids = np.concatenate([np.zeros_like(ids[:1]), ids])
        logprobs = np.concatenate([np.full_like(logprobs[:1], NO_LOGPROB), logprobs])
    return MESSAGES["TopLogprobs"](
        token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=ids.shape[1], length=ids.shape[0]
    )
