"""What all policy-gradient losses have in common: their inputs, which tokens are trained, and their metrics.

Only the model's log-probabilities are differentiated, so each loss is an `Objective`, a formula in them, of which torch
takes the gradient. T tokens of one or more packed documents.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from xorl.core.loss.head import token_logprobs
from xorl.core.loss.metrics import token_metrics
from xorl.core.loss.output import IGNORE, LossOutput, TokenValues

# A larger ratio only says that the policies have diverged, and products of it would overflow.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyTokens:
    """The arguments of an objective. Where `trained` is False, all other values are 0.

    logprobs: [T] fp32, of the model; differentiable.
    sampled: [T], of the policy that drew the tokens.
    advantages: [T].
    trained: [T] bool, the tokens that count.
    targets: everything that came with the tokens, by name.
    """

    logprobs: Tensor
    sampled: Tensor
    advantages: Tensor
    trained: Tensor
    targets: Mapping[str, Tensor]

    def known(self, name: str) -> Tensor:
        """[T], an input by its name, 0 at tokens that are not trained."""
        return self.targets[name].masked_fill(~self.trained, 0.0)

    def log_ratio(self) -> Tensor:
        """[T], log of the model's probability over that of the policy that drew the token."""
        return self.logprobs - self.sampled


@dataclass(frozen=True)
class PolicyOptions:
    """The options of every policy-gradient loss.

    compute_kl_stats: report estimates of the divergence from the policy that sampled the tokens.
    """

    compute_kl_stats: bool = True

    @property
    def needs(self) -> tuple[str, ...]:
        """Inputs that are required with these options, besides those of every policy-gradient loss."""
        return ()

    @property
    def counted_by(self) -> tuple[str, ...]:
        """Inputs that mark a token as trained where they are not 0, even if its advantage and log-probability are 0."""
        return ()


OptionsT = TypeVar("OptionsT", bound=PolicyOptions)
Objective = Callable[[PolicyTokens, OptionsT], tuple[Tensor, dict[str, Tensor]]]
"""(tokens, options) -> (loss of each token [T], values per token [T] whose means are metrics, by name)."""


@dataclass(frozen=True)
class PolicyLoss(Generic[OptionsT]):
    """The loss of an objective, called like `cross_entropy`.

    targets: labels [T] int64, already shifted; logprobs [T] of the policy that sampled the labels, replaced by
        old_logprobs if there are any; advantages [T]; and whatever else the objective reads. `weights` [T], if given,
        multiply the loss, and a token of weight 0 is not trained. Without weights, a token is not trained if its
        advantage, its log-probability and the inputs in `options.counted_by` are all 0, which is how clients write a
        prompt.
    """

    name: str
    objective: Objective[OptionsT]
    options: OptionsT

    def __call__(
        self,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Mapping[str, Tensor],
        *,
        logits_fp32: bool = True,
        whole_logits: bool = False,
    ) -> LossOutput:
        """Raises ValueError if `targets` lacks an input that the loss needs."""
        self.check_inputs(targets)
        labels, advantages = targets["labels"], targets["advantages"]
        sampled = targets["old_logprobs" if "old_logprobs" in targets else "logprobs"]
        weights = targets.get("weights")
        logprobs = token_logprobs(hidden, head_weight, labels, logits_fp32=logits_fp32, whole_logits=whole_logits)
        counts = (advantages != 0) | (sampled != 0) if weights is None else weights != 0
        for name in self.options.counted_by if weights is None else ():
            counts = counts | (targets[name] != 0) if name in targets else counts
        ignored = ~counts | (labels == IGNORE)
        tokens = PolicyTokens(
            logprobs.masked_fill(ignored, 0.0),
            sampled.masked_fill(ignored, 0.0),
            advantages.masked_fill(ignored, 0.0),
            ~ignored,
            targets,
        )
        per_token, means = self.objective(tokens, self.options)
        per_token = (per_token if weights is None else per_token * weights).masked_fill(ignored, 0.0)
        log_ratio = tokens.log_ratio().detach()
        ratio = exp_of_log_ratio(log_ratio)
        if self.options.compute_kl_stats:
            # Both estimate KL(sampler || model) by its samples, k3 with less variance: http://joschu.net/blog/kl-approx.html
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
                f"loss {self.name!r} needs {' and '.join(missing)} beside the target tokens of each datum, one number "
                f"per token; there is {', '.join(sorted(names)) or 'nothing'}"
            )


def exp_of_log_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), limited to exp(+-MAX_LOG_RATIO); beyond that, its gradient is the limited value and not 0."""
    return (log_ratio + (log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) - log_ratio).detach()).exp()


def document_mean(values: Tensor, trained: Tensor, positions: Tensor) -> Tensor:
    """[T], for each token the mean of `values` over the trained tokens of its document; differentiable.

    positions: [T], 0 at the first token of each document. Sums are fp64, so that their order makes no difference.
    """
    document = (positions == 0).cumsum(0) - 1
    sums = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    totals = sums.index_add(0, document, values.double().masked_fill(~trained, 0.0))
    counts = sums.index_add(0, document, trained.double()).clamp(min=1.0)
    return (totals / counts).index_select(0, document).to(values.dtype)
