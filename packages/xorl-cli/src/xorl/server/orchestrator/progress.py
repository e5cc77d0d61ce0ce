"""Training progress of each model, for the status. Kept in memory only, so it is lost on a restart."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field

from xorl.server.messages import Operation, Result
from xorl.server.operations import AbortGradients, ForwardBackward, LossResult, OptimResult, OptimStep

# A small chart can show this many points.
NUM_LOSSES = 100
# The loss's metric that counts trained tokens; its definition in xorl.core.loss.metrics would import torch.
_NUM_TRAINED = "valid_tokens:sum"


@dataclass
class Progress:
    """The last steps of a model, as in ModelStatus. sum_loss, num_trained: totals of the passes since the last step."""

    losses: deque[float | None] = field(default_factory=lambda: deque(maxlen=NUM_LOSSES))
    last_step: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    sum_loss: float = 0.0
    num_trained: float = 0.0


class ProgressLog:
    """The progress of models by their lanes."""

    def __init__(self) -> None:
        self._by_lane: dict[str, Progress] = {}

    def of(self, lane: str) -> Progress:
        """The progress of a model; empty if nothing is known."""
        return self._by_lane.get(lane) or Progress()

    def note(self, lane: str, operation: Operation, result: Result) -> None:
        """Record the result of a model's operation, if it is part of training."""
        progress = self._by_lane.setdefault(lane, Progress())
        if isinstance(operation, ForwardBackward) and isinstance(result, LossResult):
            if not operation.forward_only:
                progress.sum_loss += result.metrics.get("loss:sum", 0.0)
                progress.num_trained += result.metrics.get(_NUM_TRAINED, 0.0)
        elif isinstance(operation, OptimStep) and isinstance(result, OptimResult):
            mean = progress.sum_loss / progress.num_trained if progress.num_trained else math.nan
            progress.losses.append(_shown(mean))
            progress.last_step = time.time()
            progress.grad_norm = _shown(result.metrics.get("grad_norm", math.nan))
            progress.learning_rate = _shown(operation.learning_rate)
            progress.sum_loss = progress.num_trained = 0.0
        elif isinstance(operation, AbortGradients):
            progress.sum_loss = progress.num_trained = 0.0

    def keep(self, lanes: Container[str]) -> None:
        """Forget all models except those of these lanes."""
        self._by_lane = {lane: progress for lane, progress in self._by_lane.items() if lane in lanes}


def _shown(value: float) -> float | None:
    """A value rounded for display; None if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
