"""The types of loss functions and of their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from xorl.kernels.head import AnyHead, HeadWeight
from xorl.kernels.layout import SequenceLayout

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


class LossFn(Protocol):
    """A loss of the T tokens of a row, or of this rank's part of it."""

    def __call__(
        self, hidden: Tensor, head: HeadWeight, targets: Mapping[str, Tensor], layout: SequenceLayout, /
    ) -> LossOutput:
        """hidden: [T, D]. targets: by name, each [T], or [T, K] if the loss supports it."""
        ...


class HeadLoss(Protocol):
    """A `LossFn` that also takes a plain weight as its head. Only losses of whole documents need the layout."""

    def __call__(
        self,
        hidden: Tensor,
        head: AnyHead,
        targets: Mapping[str, Tensor],
        layout: SequenceLayout | None = None,
        /,
    ) -> LossOutput: ...
