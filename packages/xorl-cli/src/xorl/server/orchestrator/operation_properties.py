"""Properties of each operation: its model, its cost, whether it can share a pass, and the checkpoint that it saves."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from xorl.server.identifiers import CheckpointKind, CheckpointRef
from xorl.server.messages import Operation, Result
from xorl.server.operations import (
    AbortGradients,
    ClientOperation,
    ClientResult,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    Sample,
    SaveFullWeights,
    SaveWeights,
    SaveWeightsForSampler,
)
from xorl.server.orchestrator.journal import decoded

_encoder = msgspec.msgpack.Encoder()
_operation_decoder = msgspec.msgpack.Decoder(ClientOperation)
_result_decoder = msgspec.msgpack.Decoder(ClientResult)

# Costs are measured in bytes of a forward_backward body. A token takes about 24: its id, its target, 2 or 3 floats.
BYTES_PER_TOKEN = 24
# A step or a save takes the workers about as long as a few thousand tokens.
DEFAULT_COST = 64 * 1024.0
# The assumed length of a sample without a limit. It could fill the context, but most end earlier.
SAMPLE_TOKENS = 1024
# Kinds of the service's internal requests, as stored in the journal; all other kinds are class names of operations.
EVICTION = "Release"
SYNC_AFTER_STEP = "SyncAfterStep"
# Names of checkpoints that the service creates itself.
INITIAL_NAME = "000000"
RECOVERY_PREFIX = "recovery-"
UNNAMED_PREFIX = "unnamed-"
RESERVED_PREFIXES = (RECOVERY_PREFIX, UNNAMED_PREFIX)
# Prefix of the ids of internal requests.
INTERNAL_PREFIX = "own-"


def encode(message: Operation | Result) -> bytes:
    """Encode an operation or a result for the journal."""
    return _encoder.encode(message)


def decode_operation(body: bytes) -> ClientOperation:
    """Decode an operation from the journal. Raises Damaged if it cannot be decoded."""
    return decoded(_operation_decoder.decode, body, "a request")


def decode_result(body: bytes) -> ClientResult:
    """Decode a result from the journal. Raises Damaged if it cannot be decoded."""
    return decoded(_result_decoder.decode, body, "a result")


def cost_of(operation: Operation, size: int) -> float:
    """The workers' time for it, in bytes of a forward_backward body that takes as long. size: of its own body."""
    if isinstance(operation, ForwardBackward):
        return float(size)
    if isinstance(operation, Sample):
        tokens = operation.prompt.shape[0] + operation.num_samples * (operation.max_tokens or SAMPLE_TOKENS)
        return float(BYTES_PER_TOKEN * tokens)
    return DEFAULT_COST


def share_of(operation: Operation) -> str | None:
    """The key of operations that can share a pass; None if the operation runs alone."""
    if isinstance(operation, ForwardBackward):
        # The loss inputs must match, since missing ones have no default.
        names = sorted({name for datum in operation.data for name in datum.arrays})
        parts = (operation.loss_fn, sorted(operation.loss_params.items()), names, operation.forward_only)
        return "loss:" + _digest(parts)
    if isinstance(operation, Sample):
        return "sample:" + _digest(operation.sampler)
    return None


def tail_of(operation: Operation) -> Literal["changes", "settles"] | None:
    """How the operation extends its model's tail; see `journal.Outcome`."""
    if isinstance(operation, ForwardBackward):
        return None if operation.forward_only else "changes"
    return "settles" if isinstance(operation, OptimStep | AbortGradients | LoadWeights) else None


def saved_as(operation: Operation) -> CheckpointRef | None:
    """The checkpoint that the operation writes, or None."""
    kinds: dict[type, CheckpointKind] = {
        SaveWeights: "weights",
        SaveWeightsForSampler: "sampler_weights",
        SaveFullWeights: "external_weights",
    }
    if not isinstance(operation, SaveWeights | SaveWeightsForSampler | SaveFullWeights) or operation.name is None:
        return None
    return CheckpointRef(operation.model_id, kinds[type(operation)], operation.name)


def estimated_size(operation: Operation, checkpoint: CheckpointRef, *, is_adapter: bool) -> tuple[CheckpointKind, int]:
    """(kind, factor): the checkpoint takes about factor times the size in `ModelRecord.checkpoint_bytes` for that kind.

    For exports, the recorded size is that of a whole model in bf16. An adapter exported alone is as large as one saved
    to sample from.
    """
    if not isinstance(operation, SaveFullWeights):
        return checkpoint.kind, 1
    if is_adapter and not operation.is_merged:
        return "sampler_weights", 1
    return checkpoint.kind, 2 if operation.dtype == "float32" else 1


def export_refusal(checkpoint: CheckpointRef) -> str | None:
    """Why a checkpoint cannot be loaded or sampled from, if it is an export."""
    if checkpoint.kind != "external_weights":
        return None
    return f"{checkpoint.uri('xorl')} is an export for other tools: use a checkpoint of weights or sampler_weights"


def _digest(parts: object) -> str:
    return hashlib.blake2b(_encoder.encode(parts), digest_size=12).hexdigest()
