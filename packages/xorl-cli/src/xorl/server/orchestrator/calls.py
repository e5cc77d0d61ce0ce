"""What the orchestrator has to know of each operation: whose it is, what it costs, what it can share a pass with."""

from __future__ import annotations

import hashlib

import msgspec

from xorl.server.messages import Operation, Result
from xorl.server.names import CheckpointKind, CheckpointRef
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
from xorl.server.orchestrator.journal import Outcome

_encoder = msgspec.msgpack.Encoder()
_operation_decoder = msgspec.msgpack.Decoder(ClientOperation)
_result_decoder = msgspec.msgpack.Decoder(ClientResult)

# What a token of a forward_backward takes on the wire, about: tokens, targets and two or three floats. Costs are bytes.
BYTES_PER_TOKEN = 24
# A step or a save keeps the workers about as long as some thousands of tokens.
COST_OF_OTHERS = 64 * 1024.0
# A sample without a limit goes on to the end of the context, mostly not.
SAMPLE_TOKENS = 1024
# Kinds of requests that the service makes itself, beside the names of operations.
RELEASE = "Release"
AFTER_STEP = "SyncAfterStep"
# Names of checkpoints that the service makes for itself.
INITIAL_NAME = "000000"
RECOVERY_PREFIX = "recovery-"
# Ids of requests that the service makes itself.
OWN_PREFIX = "own-"


def encode(message: Operation | Result) -> bytes:
    """As it stands in the journal."""
    return _encoder.encode(message)


def decode_operation(body: bytes) -> ClientOperation:
    """What `encode` made of an operation."""
    return _operation_decoder.decode(body)


def decode_result(body: bytes) -> ClientResult:
    """What `encode` made of a result."""
    return _result_decoder.decode(body)


def model_of(operation: Operation) -> str | None:
    """The model whose order the operation keeps."""
    return operation.model_id if isinstance(operation, ModelOperation) else None


def cost_of(operation: Operation, size: int) -> float:
    """The workers' time that it takes, in bytes of a forward_backward that takes as long; size: of its body."""
    if isinstance(operation, ForwardBackward):
        return float(size)
    if isinstance(operation, Sample):
        tokens = operation.prompt.shape[0] + operation.num_samples * (operation.max_tokens or SAMPLE_TOKENS)
        return float(BYTES_PER_TOKEN * tokens)
    return COST_OF_OTHERS


def share_of(operation: Operation) -> str | None:
    """Operations of the same share can be one pass; None comes alone."""
    if isinstance(operation, ForwardBackward):
        # Inputs that only some of them have would have to be made up for the others.
        names = sorted({name for datum in operation.data for name in datum.arrays})
        parts = (operation.loss_fn, sorted(operation.loss_params.items()), names, operation.forward_only)
        return "loss:" + _digest(parts)
    if isinstance(operation, Sample):
        return "sample:" + _digest(operation.sampler)
    return None


def tail_of(operation: Operation) -> tuple[str, bool] | None:
    """(model, whether no gradient is left after it) of an operation that changes its model; None for others."""
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
    """What it saves takes about so many times what is kept as the size of that kind.

    Of exports that is the size of a whole model in bf16; an adapter alone is no larger than one to sample from.
    """
    if not isinstance(operation, SaveFullWeights):
        return checkpoint.kind, 1
    if is_adapter and not operation.is_merged:
        return "sampler_weights", 1
    return checkpoint.kind, 2 if operation.dtype == "float32" else 1


def failed(request_id: str, result: Result, now: float) -> Outcome:
    """The end of a request that changed nothing."""
    return Outcome(request_id, encode(result), now)


def _digest(parts: object) -> str:
    return hashlib.blake2b(_encoder.encode(parts), digest_size=12).hexdigest()
