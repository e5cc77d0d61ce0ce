"""What a loss is: the type of the function, and of what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

IGNORE = -100


class TokenValues(NamedTuple):
    """What metrics are made of, for the T tokens of one micro-batch; without gradients.

    trained: [T] bool, the tokens that count.
    means: [T] by name, averaged over the tokens that count.
    ratio: [T], the ratio of probabilities, reported by its mean and extremes; None if the loss has none.
    """

    trained: Tensor
    means: dict[str, Tensor]
    ratio: Tensor | None


class LossOutput(NamedTuple):
    """What a loss returns for the T tokens of one micro-batch.

    sum: scalar, summed over the trained tokens; what is backpropagated.
    per_token: [T] fp32, the terms of the sum: 0 where nothing is trained.
    metrics: scalars named `name:reduction`; see `metrics.py`. `score_tokens` puts a value per token there instead.
    logprobs: [T] fp32, log p(label) whatever the token's weight, 0 where the label is -100; [T, K] if each token has
        K labels; None from losses outside of xorl that do not compute it.
    values: what `metrics` are made of, to compute them for a part of the tokens; None if the loss gives none.

    Only `sum` has a gradient. This is a NamedTuple so that wrappers which look for tensors in a module's output, as
    FSDP2 and DDP do, find them.
    """

    sum: Tensor
    per_token: Tensor
    metrics: dict[str, Tensor]
    logprobs: Tensor | None = None
    values: TokenValues | None = None


LossFn = Callable[[Tensor, Tensor, Mapping[str, Tensor]], LossOutput]
"""(hidden [T, D], head weight [V, D], targets by name, each [T], or [T, K] where a loss says so) -> LossOutput."""


class HeadLoss(Protocol):
    """A loss in the table: a `LossFn` with options for how the logits are computed; see `cross_entropy`."""

    def __call__(
        self,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Mapping[str, Tensor],
        *,
        logits_fp32: bool = True,
        whole_logits: bool = False,
    ) -> LossOutput: ...
