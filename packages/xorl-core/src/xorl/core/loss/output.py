"""The contract of a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

IGNORE = -100


class LossOutput(NamedTuple):
    """What a loss returns for the T tokens of one micro-batch.

    sum: scalar, summed over the trained tokens; what is backpropagated.
    per_token: [T] fp32, the terms of the sum: 0 where nothing is trained.
    metrics: scalars named `name:reduction`; see `metrics.py`. `score_tokens` puts a value per token there instead.
    logprobs: [T] fp32, log p(label) whatever the token's weight, 0 where the label is -100; None where a loss that
        xorl does not compute gives none.

    Only `sum` has a gradient. A NamedTuple, so that wrappers which look for tensors in a module's output find them.
    """

    sum: Tensor
    per_token: Tensor
    metrics: dict[str, Tensor]
    logprobs: Tensor | None = None


LossFn = Callable[[Tensor, Tensor, Mapping[str, Tensor]], LossOutput]
"""(hidden [T, D], head weight [V, D], targets by name, each [T]) -> LossOutput."""


class HeadLoss(Protocol):
    """A loss in the table: a `LossFn` that may be told how to compute logits; see `cross_entropy`."""

    def __call__(
        self,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Mapping[str, Tensor],
        *,
        logits_fp32: bool = True,
        whole_logits: bool = False,
    ) -> LossOutput: ...
