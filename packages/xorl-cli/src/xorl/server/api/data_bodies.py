"""Bodies of forward, forward_backward and optim_step, in JSON or protobuf, and their conversion to operations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from xorl.server.api import protobuf
from xorl.server.api.parameters import read_parameters
from xorl.server.api.routed_experts import Record, record_array
from xorl.server.api.tensors import ByteBudget, TensorJson, array_of_bytes, array_of_json, tokens_array
from xorl.server.datum import Array, Datum, Dtype
from xorl.server.identifiers import SeqId, check_model_id
from xorl.server.operations import ForwardBackward, OptimStep

_DTYPE_NAMES: dict[int, Dtype] = {1: "float32", 2: "int64", 3: "int32", 4: "bfloat16"}
NO_STABLE_REINFORCE = (
    "stable_reinforce is not supported: its objective is not published, so a loss of that name would be another one. "
    "Train with another loss_fn, such as ppo, cispo or gspo"
)
LossOptions = dict[str, float | str | bool | None]


class ChunkJson(msgspec.Struct, frozen=True):
    """A part of a sequence. Only chunks of tokens are supported."""

    type: str = "encoded_text"
    tokens: list[int] | None = None


class ModelInputJson(msgspec.Struct, frozen=True):
    """A sequence, either as chunks or as token ids."""

    chunks: list[ChunkJson] | None = None
    input_ids: list[int] | None = None

    def tokens(self, vocab_size: int | None, what: str) -> Array:
        """All tokens as int32 [T]. Raises ValueError for images and audio, and if there are no tokens."""
        if (self.chunks is None) == (self.input_ids is None):
            raise ValueError(f"{what} must have either chunks or input_ids")
        ids = list(self.input_ids or [])
        for chunk in self.chunks or []:
            if chunk.tokens is None:
                raise ValueError(f"{what} has a chunk of type {chunk.type[:40]!r}, but only tokens are supported")
            ids += chunk.tokens
        if not ids:
            raise ValueError(f"{what} is empty")
        return tokens_array(ids, vocab_size, what)


class DatumJson(msgspec.Struct, frozen=True):
    """One sequence, the inputs of its loss, and the experts to send its tokens to."""

    model_input: ModelInputJson
    loss_fn_inputs: dict[str, TensorJson | list[float]] = {}
    routed_experts: Record | None = None

    def datum(self, index: int, vocab_size: int | None, budget: ByteBudget, record: Record | None = None) -> Datum:
        """The datum, validated; ValueError names it by its index. record: if it is not in the datum."""
        if self.routed_experts is not None and record is not None:
            raise ValueError(f"routed_experts of datum {index} are given twice: in the datum and for the whole call")
        record = self.routed_experts if record is None else record
        routes = None if record is None else record_array(record, budget, f"data[{index}].routed_experts")
        arrays: dict[str, Array] = {}
        for name, given in self.loss_fn_inputs.items():
            dtype = "int64" if name == "target_tokens" else "float32"
            tensor = given if isinstance(given, TensorJson) else TensorJson(given, dtype)
            arrays[name] = array_of_json(tensor, budget, f"data[{index}].loss_fn_inputs[{name!r}]")
        tokens = self.model_input.tokens(vocab_size, f"data[{index}].model_input")
        return _datum(index, tokens, arrays, vocab_size, routes)


class ForwardJson(msgspec.Struct, frozen=True):
    """The data and the loss of one call; loss_fn_params and loss_fn_config are synonyms.

    routed_experts: one record or null for each datum, for clients that do not send them within the data.
    """

    data: list[DatumJson]
    loss_fn: str = "causallm_loss"
    loss_fn_params: LossOptions | None = None
    loss_fn_config: LossOptions | None = None
    routed_experts: list[Record | None] | None = None
    routed_expert_logits: object = None


class ForwardBody(msgspec.Struct, frozen=True):
    """The body of /forward and /forward_backward. The input is in the field that is named after the path."""

    model_id: str = "default"
    seq_id: SeqId | None = None
    forward_backward_input: ForwardJson | None = None
    forward_input: ForwardJson | None = None

    def operation(self, *, forward_only: bool, vocab_size: int | None, budget: ByteBudget) -> ForwardBackward:
        """The operation, validated; raises ValueError."""
        given = self.forward_backward_input or self.forward_input
        if given is None:
            raise ValueError("the body must have forward_backward_input, or forward_input for /forward")
        if given.routed_expert_logits is not None:
            raise ValueError(
                "routed_expert_logits is not supported: experts are weighted by the trainer's own scores, so that the "
                "routers keep their gradients; send routed_experts alone"
            )
        records = given.routed_experts or [None] * len(given.data)
        if len(records) != len(given.data):
            raise ValueError(
                f"routed_experts has {len(records)} records for {len(given.data)} datums: send one for each, or null"
            )
        pairs = zip(given.data, records, strict=True)
        data = [datum.datum(index, vocab_size, budget, record) for index, (datum, record) in enumerate(pairs)]
        if given.loss_fn_params and given.loss_fn_config:
            raise ValueError("loss_fn_params and loss_fn_config are synonyms: send the loss's options in one of them")
        options = given.loss_fn_params or given.loss_fn_config or {}
        return _forward_backward(self.model_id, data, given.loss_fn, options, forward_only)


class AdamJson(msgspec.Struct, frozen=True):
    """AdamW's parameters for one step; both clients send all of them."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimBody(msgspec.Struct, frozen=True):
    """The body of /optim_step."""

    model_id: str = "default"
    seq_id: SeqId | None = None
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None
    learning_rate: float | None = None
    lr: float | None = None
    gradient_clip: float | None = None

    def operation(self) -> OptimStep:
        """The operation, validated; raises ValueError."""
        if self.optimizer_params is not None:
            kind = str(self.optimizer_params.get("type"))[:40]
            raise ValueError(f"optimizer_params of type {kind!r} are not supported: send adam_params")
        adam = read_parameters(self.adam_params or {}, AdamJson, "adam_params")
        rates = [rate for rate in (self.learning_rate, self.lr) if rate is not None]
        clip = adam.grad_clip_norm if self.gradient_clip is None else max(self.gradient_clip, 0.0)
        step = OptimStep(
            check_model_id(self.model_id),
            learning_rate=rates[0] if rates else adam.learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            grad_clip_norm=clip,
        )
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            value = getattr(step, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and 0 or more, got {value}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(step, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(step, name)}")
        return step


def parse_protobuf(body: bytes, vocab_size: int | None, budget: ByteBudget) -> tuple[ForwardBackward, int]:
    """The operation in a protobuf body and its seq_id, validated; raises ValueError."""
    # The classes of messages are generated at run time, so their fields have no types.
    request: Any = protobuf.parse("ForwardBackwardRequest", body)
    data = [_datum_of_protobuf(index, datum, vocab_size, budget) for index, datum in enumerate(request.data)]
    options: LossOptions = {option.key: option.value for option in request.loss_fn_config}
    for option in request.loss_fn_config_v2:
        options[option.key] = option.value.text if option.value.WhichOneof("value") == "text" else option.value.number
    call = _forward_backward(request.model_id, data, request.loss_fn, options, request.forward_only)
    return call, request.seq_id


# datum: a generated message, whose fields have no types.
def _datum_of_protobuf(index: int, datum: Any, vocab_size: int | None, budget: ByteBudget) -> Datum:  # noqa: ANN401
    what = f"data[{index}].model_input"
    parts: list[bytes] = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ValueError(f"{what} has a chunk of type {kind!r}, but only tokens are supported")
        if len(chunk.encoded_text.tokens) % 4:
            raise ValueError(f"{what} has a chunk whose length in bytes is not a multiple of 4")
        parts.append(chunk.encoded_text.tokens)
    tokens = tokens_array(np.frombuffer(b"".join(parts), "<i4"), vocab_size, what)
    arrays: dict[str, Array] = {}
    for named in datum.loss_fn_inputs:
        tensor = named.value
        if tensor.dtype not in _DTYPE_NAMES:
            raise ValueError(f"data[{index}].loss_fn_inputs[{named.key!r}]: unknown dtype {tensor.dtype}")
        csr = tensor.sparse_csr if tensor.WhichOneof("encoding") == "sparse_csr" else None
        sparse = None if csr is None else (csr.values, csr.crow_indices, csr.col_indices)
        arrays[named.key] = array_of_bytes(
            _DTYPE_NAMES[tensor.dtype],
            list(tensor.shape),
            tensor.dense,
            sparse,
            budget,
            f"data[{index}].loss_fn_inputs[{named.key!r}]",
        )
    return _datum(index, tokens, arrays, vocab_size)


def _datum(
    index: int, tokens: Array, arrays: Mapping[str, Array], vocab_size: int | None, routes: Array | None = None
) -> Datum:
    targets = arrays.get("target_tokens")
    if targets is not None:
        if targets.dtype != "int64":
            raise ValueError(f"data[{index}]: target_tokens must be integers, got {targets.dtype}")
        ids = targets.numpy()
        limit = vocab_size or 2**31
        if ids.size and not (ids.min() >= -100 and ids.max() < limit):
            raise ValueError(f"data[{index}]: target_tokens must be 0 to {limit - 1}, or -100 for no target")
    floats = {name: array for name, array in arrays.items() if name != "target_tokens"}
    for name, array in floats.items():
        if array.dtype == "int64":
            floats[name] = Array.of(array.numpy().astype(np.float32))
    try:
        return Datum(tokens, floats if targets is None else {"target_tokens": targets, **floats}, routes)
    except ValueError as problem:
        raise ValueError(f"data[{index}]: {problem}") from None


def _forward_backward(
    model_id: str, data: list[Datum], loss_fn: str, options: LossOptions, forward_only: bool
) -> ForwardBackward:
    if not data:
        raise ValueError("data is empty")
    if loss_fn == "stable_reinforce":
        raise ValueError(NO_STABLE_REINFORCE)
    for name, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"loss option {name!r} must be finite, got {value}")
    return ForwardBackward(check_model_id(model_id), data, loss_fn, dict(options), forward_only)
