"""Validates the arguments of forward and backward calls, and builds their results.

Shapes: n tokens of a datum, K targets at each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from xorl.core.loss import get_loss
from xorl.core.loss.output import HeadLoss
from xorl.core.loss.policy import PolicyLoss
from xorl.core.loss.table import check_inputs
from xorl.server.batching import Example, check_examples
from xorl.server.datum import Array, Datum
from xorl.server.operations import ForwardBackward, LossResult
from xorl.server.worker.routes import RoutedLayers

TARGETS = "target_tokens"
INPUTS = (
    *("weights", "advantages", "logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs"),
    *("clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"),
)
# Parameters of the request, not of the loss. num_chunks is accepted and ignored: the head bounds its memory itself.
RETURN_PER_TOKEN, RETURN_ROUTES, NUM_CHUNKS = "return_per_token", "return_routed_experts", "num_chunks"
OUTPUT_TYPE: Literal["TorchLossReturn"] = "TorchLossReturn"


@dataclass(frozen=True)
class PassCall:
    """A validated ForwardBackward.

    Attributes:
        returns_tokens: whether the result contains values per token, in addition to the metrics.
        returns_routes: whether it contains the experts of each token.
        key: calls with the same key can share a pass.
    """

    model_id: str
    examples: tuple[Example, ...]
    loss: HeadLoss
    forward_only: bool
    returns_tokens: bool
    returns_routes: bool
    key: tuple[object, ...]


def read_call(
    operation: ForwardBackward, *, bin_len: int, vocab_size: int, routed: RoutedLayers | None = None
) -> PassCall:
    """Validate a client's call. Raises ValueError with the datum or the parameter that is invalid.

    routed: of a mixture of experts.
    """
    if not operation.data:
        raise ValueError("data is empty: a forward or forward_backward needs at least one datum")
    parameters = dict(operation.loss_params)
    returns_tokens = _flag(parameters, RETURN_PER_TOKEN, default=True)
    returns_routes = _flag(parameters, RETURN_ROUTES, default=False)
    if returns_routes and routed is None:
        raise ValueError(f"{RETURN_ROUTES}: the model has no experts; leave it out")
    num_chunks = parameters.pop(NUM_CHUNKS, None)
    if num_chunks is not None and (not isinstance(num_chunks, float | int) or num_chunks < 1):
        raise ValueError(f"{NUM_CHUNKS} must be a number of at least 1, got {num_chunks!r}")
    loss = get_loss(operation.loss_fn, parameters)
    examples = tuple(_example(index, datum, operation.model_id, routed) for index, datum in enumerate(operation.data))
    check_examples(examples, bin_len=bin_len, vocab_size=vocab_size)
    names = sorted({name for example in examples for name in example.fields})
    check_inputs(loss, names)
    has_several_targets = any(example.targets.ndim == 2 for example in examples)
    if has_several_targets and isinstance(loss, PolicyLoss):
        raise ValueError(f"loss {operation.loss_fn!r} takes one target token per position, but the data have several")
    key = (
        operation.loss_fn,
        tuple(sorted(parameters.items())),
        operation.forward_only,
        tuple(names),
        has_several_targets,
    )
    return PassCall(operation.model_id, examples, loss, operation.forward_only, returns_tokens, returns_routes, key)


def _flag(parameters: dict[str, float | str | bool | None], name: str, *, default: bool) -> bool:
    """Remove a parameter that is true or false, or 1 or 0 as protobuf sends it."""
    value = parameters.pop(name, default)
    if value not in (0, 1):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return bool(value)


def _example(index: int, datum: Datum, owner: str, routed: RoutedLayers | None) -> Example:
    if TARGETS not in datum.arrays:
        raise ValueError(f"datum {index} has no {TARGETS}: the tokens that follow each of its tokens")
    unknown = sorted(datum.arrays.keys() - {TARGETS, *INPUTS})
    if unknown:
        raise ValueError(f"datum {index}: unknown input {unknown[0]}, must be one of {TARGETS}, {', '.join(INPUTS)}")
    tokens, targets = (array.numpy().astype(np.int64) for array in (datum.tokens, datum.arrays[TARGETS]))
    fields = {name: array.numpy().astype(np.float32) for name, array in datum.arrays.items() if name != TARGETS}
    return Example(tokens, targets, fields, owner, _routes(index, datum, routed))


def _routes(index: int, datum: Datum, routed: RoutedLayers | None) -> NDArray[np.int16] | None:
    if datum.routed_experts is None:
        return None
    if routed is None:
        raise ValueError(f"datum {index}: routed_experts: the model has no experts; leave them out")
    try:
        return routed.read(datum.routed_experts, datum.tokens.shape[0])
    except ValueError as problem:
        raise ValueError(f"datum {index}: routed_experts: {problem}") from None


def result_of(
    call: PassCall,
    logprobs: Sequence[NDArray[np.float32]],
    losses: Sequence[NDArray[np.float32]] | None,
    routes: Sequence[Array],
    metrics: Mapping[str, float],
) -> LossResult:
    """The result of a call: the values of each datum, in the order of the data.

    losses: None if targets are [n, K]; the losses are then computed from the log-probabilities. routes: the experts of
    each token, if the call returns them.
    """
    fields: dict[str, list[Array]] = {}
    if call.returns_tokens:
        if losses is None:
            losses = [_weighted(example, values) for example, values in zip(call.examples, logprobs, strict=True)]
        fields = {
            "logprobs": [Array.of(values) for values in logprobs],
            "elementwise_loss": [Array.of(values) for values in losses],
        }
    if call.returns_routes:
        fields["routed_experts"] = list(routes)
    return LossResult(OUTPUT_TYPE, fields, dict(metrics))


def _weighted(example: Example, logprobs: NDArray[np.float32]) -> NDArray[np.float32]:
    weights = example.fields.get("weights")
    return -logprobs if weights is None else (-logprobs * weights).astype(np.float32)
