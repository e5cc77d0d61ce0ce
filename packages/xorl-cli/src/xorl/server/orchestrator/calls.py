"""What the orchestrator knows of each operation: its model, its cost, what it can share a pass with, what it saves."""

from __future__ import annotations

import hashlib

import msgspec

from xorl.server.identifiers import CheckpointKind, CheckpointRef
from xorl.server.messages import Operation, Result
from xorl.server.operations import (
    AbortGradients,
    ClientOperation,
    ClientResult,
    ForwardBackward,
    LoadWeights,
    ModelOperation,
    OptimStep,
    Sample,
    SaveFullWeights,
    SaveWeights,
    SaveWeightsForSampler,
)
from xorl.server.orchestrator.journal import Outcome, decoded

_encoder = msgspec.msgpack.Encoder()
_operation_decoder = msgspec.msgpack.Decoder(ClientOperation)
_result_decoder = msgspec.msgpack.Decoder(ClientResult)

# Costs are bytes of a forward_backward's body, in which a token takes about this: its id, its target, 2 or 3 floats.
BYTES_PER_TOKEN = 24
# A step or a save takes the workers about as long as some thousands of tokens.
COST_OF_OTHERS = 64 * 1024.0
# The assumed length of a sample without a limit, which could fill the context but mostly does not.
SAMPLE_TOKENS = 1024
# Kinds of requests that the service makes itself; all other kinds are names of operations.
RELEASE = "Release"
AFTER_STEP = "SyncAfterStep"
# Names of checkpoints that the service makes for itself.
INITIAL_NAME = "000000"
RECOVERY_PREFIX = "recovery-"
# Ids of requests that the service makes itself.
OWN_PREFIX = "own-"


def encode(message: Operation | Result) -> bytes:
    """The form in which the journal keeps an operation or a result."""
    return _encoder.encode(message)


def decode_operation(body: bytes) -> ClientOperation:
    """The inverse of `encode`, for an operation. Raises Damaged for what is none."""
    return decoded(_operation_decoder.decode, body, "a request")


def decode_result(body: bytes) -> ClientResult:
    """The inverse of `encode`, for a result. Raises Damaged for what is none."""
    return decoded(_result_decoder.decode, body, "a result")


def model_of(operation: Operation) -> str | None:
    """The model in whose order the operation runs; None if it belongs to none."""
    return operation.model_id if isinstance(operation, ModelOperation) else None


def cost_of(operation: Operation, size: int) -> float:
    """How long it takes the workers, in bytes of a forward_backward that takes as long. size: bytes of its body."""
    if isinstance(operation, ForwardBackward):
        return float(size)
    if isinstance(operation, Sample):
        tokens = operation.prompt.shape[0] + operation.num_samples * (operation.max_tokens or SAMPLE_TOKENS)
        return float(BYTES_PER_TOKEN * tokens)
    return COST_OF_OTHERS


def share_of(operation: Operation) -> str | None:
    """Operations with the same key can share a pass; one with None runs alone."""
    if isinstance(operation, ForwardBackward):
        # The inputs must be the same: missing ones would have to be made up.
        names = sorted({name for datum in operation.data for name in datum.arrays})
        parts = (operation.loss_fn, sorted(operation.loss_params.items()), names, operation.forward_only)
        return "loss:" + _digest(parts)
    if isinstance(operation, Sample):
        return "sample:" + _digest(operation.sampler)
    return None


def tail_of(operation: Operation) -> tuple[str, bool] | None:
    """For an operation that changes its model: (model, whether it leaves no gradient behind). None for others."""
    if isinstance(operation, ForwardBackward):
        return None if operation.forward_only else (operation.model_id, False)
    if isinstance(operation, OptimStep | AbortGradients | LoadWeights):
        return operation.model_id, True
    return None


def saved_as(operation: Operation) -> CheckpointRef | None:
    """The checkpoint that the operation writes; None where it writes none."""
    kinds: dict[type, CheckpointKind] = {
        SaveWeights: "weights",
        SaveWeightsForSampler: "sampler_weights",
        SaveFullWeights: "external_weights",
    }
    if not isinstance(operation, SaveWeights | SaveWeightsForSampler | SaveFullWeights) or operation.name is None:
        return None
    return CheckpointRef(operation.model_id, kinds[type(operation)], operation.name)


def kept_size(operation: Operation, checkpoint: CheckpointRef, *, is_adapter: bool) -> tuple[CheckpointKind, int]:
    """(kind, factor): what the operation saves takes about factor times the size that is on record for that kind.

    For exports the size on record is that of a whole model in bf16; an exported adapter alone is as large as one that
    is saved to sample from.
    """
    if not isinstance(operation, SaveFullWeights):
        return checkpoint.kind, 1
    if is_adapter and not operation.is_merged:
        return "sampler_weights", 1
    return checkpoint.kind, 2 if operation.dtype == "float32" else 1


def failed(request_id: str, result: Result, now: float) -> Outcome:
    """The outcome of a request that changed nothing."""
    return Outcome(request_id, encode(result), now)


def _digest(parts: object) -> str:
    return hashlib.blake2b(_encoder.encode(parts), digest_size=12).hexdigest()
