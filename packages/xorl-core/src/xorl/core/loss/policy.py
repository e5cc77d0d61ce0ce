"""The parts that all policy-gradient losses share: inputs, selection of trained tokens, and metrics.

Each loss is an `Objective`: a formula in the model's log-probabilities, differentiated by torch.

Shapes: T tokens of one or more packed documents; if ranks share a row, those of this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from xorl.core.loss.cross_entropy import labels_of
from xorl.core.loss.documents import document_mean
from xorl.core.loss.head import token_logprobs
from xorl.core.loss.metrics import token_metrics
from xorl.core.loss.output import IGNORE, LossOutput, TokenValues
from xorl.kernels.head import AnyHead
from xorl.kernels.layout import SequenceLayout

# Larger ratios carry no information beyond "diverged", and products of them would overflow.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyTokens:
    """The inputs of an objective. The log-probabilities and advantages of untrained tokens are 0.

    logprobs: [T] fp32, of the model; differentiable.
    sampled: [T], of the policy that sampled the tokens.
    advantages: [T].
    trained: [T] bool, whether the token is trained.
    targets: all inputs by name, not masked.
    layout: the documents of the tokens; None if the caller gave none.
    """

    logprobs: Tensor
    sampled: Tensor
    advantages: Tensor
    trained: Tensor
    targets: Mapping[str, Tensor]
    layout: SequenceLayout | None

    def masked(self, name: str) -> Tensor:
        """The input `name` [T], 0 for tokens that are not trained."""
        return _per_token(self.targets, name).masked_fill(~self.trained, 0.0)

    def log_ratio(self) -> Tensor:
        """[T], log of the ratio of the model's probability to that of the policy that sampled the token."""
        return self.logprobs - self.sampled

    def document_mean(self, values: Tensor, chosen: Tensor) -> Tensor:
        """For each token, the mean of `values` [T] over the tokens of its document in `chosen`, [T] bool: [T].

        The only way to values of whole documents: other ranks may have a part of their tokens. Differentiable.
        Raises ValueError without a layout.
        """
        if self.layout is None:
            raise ValueError("a loss of whole documents needs the layout of the tokens, which tells documents apart")
        if values.shape != (self.layout.num_tokens,):
            raise ValueError(
                f"layout: has {self.layout.num_tokens} tokens, but the row has {len(values)}; give the row's own layout"
            )
        return document_mean(values, chosen, self.layout)


@dataclass(frozen=True)
class PolicyOptions:
    """The options of every policy-gradient loss.

    compute_kl_stats: add metrics that estimate the divergence from the policy that sampled the tokens.
    """

    compute_kl_stats: bool = True

    @property
    def needs(self) -> tuple[str, ...]:
        """The inputs that these options require, in addition to those of every policy-gradient loss."""
        return ()

    @property
    def marks_trained(self) -> tuple[str, ...]:
        """Inputs whose nonzero values mark tokens as trained, even if their advantage and log-probability are 0."""
        return ()


OptionsT = TypeVar("OptionsT", bound=PolicyOptions)
Objective = Callable[[PolicyTokens, OptionsT], tuple[Tensor, dict[str, Tensor]]]
"""(tokens, options) -> (loss of each token [T], values per token [T] whose means are metrics, by name)."""


@dataclass(frozen=True)
class PolicyLoss(Generic[OptionsT]):
    """The loss of an objective, called like `cross_entropy`.

    targets: labels [T] int64, already shifted; logprobs [T] of the policy that sampled the labels, overridden by
        old_logprobs if given; advantages [T]; and the other inputs of the objective. `weights` [T], if given, multiply
        the loss, and a token of weight 0 is not trained. Without weights, a token is not trained if its advantage, its
        log-probability and the inputs in `options.marks_trained` are all 0: this is how clients mark prompts.
    """

    name: str
    objective: Objective[OptionsT]
    options: OptionsT

    def __call__(
        self,
        hidden: Tensor,
        head: AnyHead,
        targets: Mapping[str, Tensor],
        layout: SequenceLayout | None = None,
        /,
    ) -> LossOutput:
        """Raises ValueError if the loss needs an input that `targets` lacks, or a layout that is not given.

        Every input must have the shape of the labels.
        """
        self.check_inputs(targets)
        labels, advantages = labels_of(hidden, targets), _per_token(targets, "advantages")
        sampled = _per_token(targets, "old_logprobs" if "old_logprobs" in targets else "logprobs")
        weights = _per_token(targets, "weights") if "weights" in targets else None
        logprobs = token_logprobs(hidden, head, labels)
        is_marked = (advantages != 0) | (sampled != 0) if weights is None else weights != 0
        for name in self.options.marks_trained if weights is None else ():
            is_marked = is_marked | (_per_token(targets, name) != 0) if name in targets else is_marked
        ignored = ~is_marked | (labels == IGNORE)
        tokens = PolicyTokens(
            logprobs.masked_fill(ignored, 0.0),
            sampled.masked_fill(ignored, 0.0),
            advantages.masked_fill(ignored, 0.0),
            ~ignored,
            targets,
            layout,
        )
        per_token, means = self.objective(tokens, self.options)
        per_token = (per_token if weights is None else per_token * weights).masked_fill(ignored, 0.0)
        log_ratio = tokens.log_ratio().detach()
        ratio = exp_of_log_ratio(log_ratio)
        if self.options.compute_kl_stats:
            # Estimators of KL(sampler || model); k3 has less variance: http://joschu.net/blog/kl-approx.html
            means = means | {"kl_sample_train_k1": -log_ratio, "kl_sample_train_k3": ratio - 1 - log_ratio}
        values = TokenValues(tokens.trained, {name: value.detach() for name, value in means.items()}, ratio)
        metrics = token_metrics(per_token, values)
        return LossOutput(per_token.sum(), per_token.detach(), metrics, logprobs.detach(), values)

    def check_inputs(self, names: Collection[str]) -> None:
        """Raise ValueError if the loss needs an input that is not among `names`."""
        if "old_logprobs" in names:
            names = {*names, "logprobs"}
        missing = [name for name in ("logprobs", "advantages", *self.options.needs) if name not in names]
        if missing:
            raise ValueError(
                f"loss {self.name!r} needs {' and '.join(missing)} as inputs, one number per target token of a datum; "
                f"got {', '.join(sorted(names)) or 'none'}"
            )


def _per_token(targets: Mapping[str, Tensor], name: str) -> Tensor:
    """The input `name`. Raises ValueError unless it has a number for each label: others would be broadcast."""
    values, labels = targets[name], targets["labels"]
    if values.shape != labels.shape:
        raise ValueError(f"{name} must have shape {list(labels.shape)}, as labels; got {list(values.shape)}")
    return values


def exp_of_log_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio clamped to +-MAX_LOG_RATIO); beyond the limits, the gradient is the clamped result instead of 0."""
    # The difference is exactly 0. Adding the distance to the limit instead would round large log-ratios: 1e9 to 0.
    return (log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + (log_ratio - log_ratio.detach())).exp()
