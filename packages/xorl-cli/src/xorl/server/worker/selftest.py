"""A self-test at startup: trains a step on random tokens, to check that this model trains on this machine."""

from __future__ import annotations

import logging
import math

import numpy as np

from xorl.server.datum import Array, Datum
from xorl.server.messages import Operation, Result, Work
from xorl.server.operations import (
    CreateModel,
    Failure,
    ForwardBackward,
    LossResult,
    OptimResult,
    OptimStep,
    UnloadModel,
)
from xorl.server.worker.saved_models import PendingSave
from xorl.server.worker.worker import Worker

logger = logging.getLogger(__name__)

MODEL_ID = "self-test"
NUM_TOKENS = 64


def self_test(worker: Worker) -> None:
    """Train a temporary model for one step with learning rate 0; collective.

    Raises RuntimeError on every rank if that fails or if the loss or the gradient is not finite.
    """
    vocab_size = worker.base.architecture.config.vocab_size
    length = min(NUM_TOKENS, worker.base.config.sample_packing_sequence_len)
    tokens = np.random.default_rng(0).integers(0, vocab_size, length + 1)
    datum = Datum(Array.of(tokens[:-1].astype(np.int32)), {"target_tokens": Array.of(tokens[1:].astype(np.int64))})
    _run(worker, CreateModel(MODEL_ID))
    # One datum for each data-parallel rank.
    loss = _run(worker, ForwardBackward(MODEL_ID, [datum] * worker.base.mesh.data.size, "cross_entropy"))
    update = _run(worker, OptimStep(MODEL_ID, learning_rate=0.0))
    _run(worker, UnloadModel(MODEL_ID))
    assert isinstance(loss, LossResult)
    assert isinstance(update, OptimResult)
    mean, norm = loss.metrics["loss:mean"], update.metrics["grad_norm"]
    if not (math.isfinite(mean) and math.isfinite(norm)):
        raise RuntimeError(f"enable_self_test: the loss is {mean} and the gradient's norm {norm} on random tokens")
    logger.info("event=self_test loss=%.4f grad_norm=%.4g tokens=%d", mean, norm, length)


def _run(worker: Worker, operation: Operation) -> Result:
    (result,) = worker.run(Work([f"self-test-{type(operation).__name__}"], [operation]))
    if isinstance(result, Failure):
        raise RuntimeError(f"enable_self_test: {type(operation).__name__} failed: {result.message}")
    assert not isinstance(result, PendingSave), "the self-test saves nothing"
    return result
