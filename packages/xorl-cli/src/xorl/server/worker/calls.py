"""Checks what clients ask of forward and backward passes, and makes the results that go back to them.

Shapes: n tokens of a datum, K targets at each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from xorl.core.loss import HeadLoss, check_inputs, loss_named
from xorl.core.loss.policy import PolicyLoss
from xorl.server.batching import Example, check_examples
from xorl.server.datum import Array, Datum
from xorl.server.operations import ForwardBackward, LossResult

TARGETS = "target_tokens"
INPUTS = (
    *("weights", "advantages", "logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs"),
    *("clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"),
)
# Parameters of the request rather than of the loss; num_chunks asks for what our head does by itself: bound its memory.
RETURN_PER_TOKEN, NUM_CHUNKS = "return_per_token", "num_chunks"
OUTPUT_TYPE: Literal["TorchLossReturn"] = "TorchLossReturn"


@dataclass(frozen=True)
class Call:
    """One ForwardBackward that can be computed.

    Attributes:
        key: calls of one key can share a pass.
        returns_tokens: whether values per token go back beside the metrics.
    """

    model_id: str
    examples: tuple[Example, ...]
    loss: HeadLoss
    forward_only: bool
    returns_tokens: bool
    key: tuple[object, ...]


def read_call(operation: ForwardBackward, *, bin_len: int, vocab_size: int) -> Call:
    """Check what a client asks for. Raises ValueError that names the datum or the parameter at fault."""
    if not operation.data:
        raise ValueError("data is empty: a forward or forward_backward needs at least one datum")
    parameters = dict(operation.loss_params)
    returns_tokens = _switch(RETURN_PER_TOKEN, parameters.pop(RETURN_PER_TOKEN, True))
    num_chunks = parameters.pop(NUM_CHUNKS, None)
    if num_chunks is not None and (not isinstance(num_chunks, float | int) or num_chunks < 1):
        raise ValueError(f"{NUM_CHUNKS} is a number of at least 1, got {num_chunks!r}")
    loss = loss_named(operation.loss_fn, parameters)
    examples = tuple(_example(index, datum, operation.model_id) for index, datum in enumerate(operation.data))
    check_examples(examples, bin_len=bin_len, vocab_size=vocab_size)
    names = sorted({name for example in examples for name in example.fields})
    check_inputs(loss, names)
    several = any(example.targets.ndim == 2 for example in examples)
    if several and isinstance(loss, PolicyLoss):
        raise ValueError(f"loss {operation.loss_fn!r} takes one target token at each place, and data have several")
    key = (
        operation.loss_fn,
        tuple(sorted(parameters.items())),
        operation.forward_only,
        tuple(names),
        several,
    )
    return Call(operation.model_id, examples, loss, operation.forward_only, returns_tokens, key)


def _switch(name: str, value: object) -> bool:
    if value not in (0, 1, True, False):
        raise ValueError(f"{name} is true or false, got {value!r}")
    return bool(value)


def _example(index: int, datum: Datum, owner: str) -> Example:
    if TARGETS not in datum.arrays:
        raise ValueError(f"datum {index} has no {TARGETS}: the tokens that follow each of its tokens")
    unknown = sorted(datum.arrays.keys() - {TARGETS, *INPUTS})
    if unknown:
        raise ValueError(f"datum {index}: no loss reads {unknown[0]}; there are {TARGETS}, {', '.join(INPUTS)}")
    fields = {name: _floats(array) for name, array in datum.arrays.items() if name != TARGETS}
    return Example(_integers(datum.tokens), _integers(datum.arrays[TARGETS]), fields, owner)


def _integers(array: Array) -> NDArray[np.int64]:
    return array.numpy().astype(np.int64)


def _floats(array: Array) -> NDArray[np.float32]:
    return array.numpy().astype(np.float32)


def result_of(
    call: Call,
    logprobs: Sequence[NDArray[np.float32]],
    losses: Sequence[NDArray[np.float32]] | None,
    metrics: Mapping[str, float],
) -> LossResult:
    """What a call gives back: values of each datum, in the order of the data.

    losses: None where targets are [n, K]: they are made of the log-probabilities.
    """
    fields: dict[str, list[Array]] = {}
    if call.returns_tokens:
        if losses is None:
            losses = [_weighted(example, own) for example, own in zip(call.examples, logprobs, strict=True)]
        fields = {
            "logprobs": [Array.of(values) for values in logprobs],
            "elementwise_loss": [Array.of(values) for values in losses],
        }
    return LossResult(OUTPUT_TYPE, fields, dict(metrics))


def _weighted(example: Example, logprobs: NDArray[np.float32]) -> NDArray[np.float32]:
    weights = example.fields.get("weights")
    return -logprobs if weights is None else (-logprobs * weights).astype(np.float32)
