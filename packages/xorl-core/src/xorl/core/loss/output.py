"""The types of loss functions and of their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from xorl.kernels.layout import SequenceLayout
from xorl.kernels.vocabulary import Vocabulary

IGNORE = -100


class TokenValues(NamedTuple):
    """Values per token from which metrics are computed, for the T tokens of one micro-batch; no gradients.

    trained: [T] bool, whether the token is trained.
    means: [T] by name; the metric is the mean over trained tokens.
    ratio: [T], the ratio of probabilities; the metrics are its mean and extremes. None if the loss has none.
    """

    trained: Tensor
    means: dict[str, Tensor]
    ratio: Tensor | None


class LossOutput(NamedTuple):
    """The result of a loss for the T tokens of one micro-batch.

    sum: scalar, the sum over trained tokens, to be backpropagated.
    per_token: [T] fp32, the terms of the sum; 0 for tokens that are not trained.
    metrics: scalars named `name:reduction`; see `metrics.py`. `score_tokens` gives one value per token instead.
    logprobs: [T] fp32, log p(label) regardless of the token's weight, 0 for labels of -100; [T, K] if each token has K
        labels. Custom losses may leave it None.
    values: the values per token behind `metrics`, for computing metrics of a part of the tokens; may be None.

    Only `sum` has a gradient. This is a NamedTuple so that FSDP2 and DDP find the tensors in a module's output.
    """

    sum: Tensor
    per_token: Tensor
    metrics: dict[str, Tensor]
    logprobs: Tensor | None = None
    values: TokenValues | None = None


LossFn = Callable[[Tensor, Tensor, Mapping[str, Tensor], SequenceLayout], LossOutput]
"""(hidden [T, D], head weight [V, D], targets by name, each [T], or [T, K] if the loss supports it, layout of the T
tokens) -> LossOutput. If ranks share a row, the T tokens are this rank's part of it."""


class HeadLoss(Protocol):
    """A `LossFn` with options for how logits are computed; see `cross_entropy`.

    Only losses of whole documents need the layout.
    """

    def __call__(
        self,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Mapping[str, Tensor],
        layout: SequenceLayout | None = None,
        /,
        *,
        logits_fp32: bool = True,
        whole_logits: bool = False,
        vocab: Vocabulary | None = None,
    ) -> LossOutput: ...
