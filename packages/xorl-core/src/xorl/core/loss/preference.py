"""Losses of pairs of answers to a prompt, of which one is preferred.

Each is a formula in the log-probabilities of the two answers. Metrics count each pair once.

Shapes: T tokens of this rank, P pairs of the row. A row has the documents chosen, rejected, chosen, ..., then padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from xorl.core.loss.cross_entropy import labels_of
from xorl.core.loss.documents import document_of, document_sums
from xorl.core.loss.head import token_logprobs
from xorl.core.loss.metrics import token_metrics
from xorl.core.loss.output import IGNORE, LossOutput, TokenValues
from xorl.kernels.head import AnyHead
from xorl.kernels.layout import SequenceLayout

# Further targets, [T] each: the first is a column of the data, the trainer adds the others.
PREFERENCE, REFERENCE, BASELINE = "preference", "reference_logprobs", "baseline"
# Keeps the probability of an answer below 1, so that its odds are finite.
_LARGEST_MEAN = -1e-9


@dataclass(frozen=True)
class Pairs:
    """The log-probabilities of answers, sums over their trained tokens; [P] fp64 each.

    chosen, rejected: of the model; differentiable.
    reference_chosen, reference_rejected: of the reference model; 0 for losses without one.
    num_chosen, num_rejected: the numbers of trained tokens.
    baseline: the log-ratio of model and reference for answers to other prompts, at least 0; only of `kto`.
    """

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    num_chosen: Tensor
    num_rejected: Tensor
    baseline: Tensor

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """The mean log-probability of a token, for both answers."""
        return self.chosen / self.num_chosen, self.rejected / self.num_rejected

    @property
    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """The log-ratio of model and reference, for both answers."""
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected


@dataclass(frozen=True)
class PreferenceOptions:
    """The options of all preference losses. The docstring of each loss lists those that it reads.

    beta: the scale of rewards; of `orpo`, the weight of its second term.
    label_smoothing: the probability, below 1/2, that a preference is the wrong way round.
    length_normalized: divide log-ratios by the number of tokens.
    gamma: the margin by which the chosen answer is to win.
    desirable_weight, undesirable_weight: of chosen and of rejected answers.
    """

    beta: float
    label_smoothing: float = 0.0
    length_normalized: bool = False
    gamma: float = 0.5
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


Objective = Callable[[Pairs, PreferenceOptions], tuple[Tensor, tuple[Tensor, Tensor], dict[str, Tensor]]]
"""(pairs, options) -> (loss [P], rewards of both answers [P], further metrics [P] by name)."""


def dpo(pairs: Pairs, options: PreferenceOptions) -> tuple[Tensor, tuple[Tensor, Tensor], dict[str, Tensor]]:
    """-(1 - s) log sigmoid(beta (c - r)) - s log sigmoid(-beta (c - r)), for log-ratios c and r.

    Options: beta, label_smoothing s (https://arxiv.org/abs/2305.18290), length_normalized.
    """
    chosen, rejected = pairs.log_ratios
    if options.length_normalized:
        chosen, rejected = chosen / pairs.num_chosen, rejected / pairs.num_rejected
    rewards = options.beta * chosen, options.beta * rejected
    return _smoothed(rewards[0] - rewards[1], options.label_smoothing), rewards, {}


def simpo(pairs: Pairs, options: PreferenceOptions) -> tuple[Tensor, tuple[Tensor, Tensor], dict[str, Tensor]]:
    """-log sigmoid(beta (c - r) - gamma), for mean log-probabilities c and r; smoothed as `dpo`.

    Options: beta, gamma (https://arxiv.org/abs/2405.14734), label_smoothing.
    """
    chosen, rejected = pairs.means
    rewards = options.beta * chosen, options.beta * rejected
    return _smoothed(rewards[0] - rewards[1] - options.gamma, options.label_smoothing), rewards, {}


def orpo(pairs: Pairs, options: PreferenceOptions) -> tuple[Tensor, tuple[Tensor, Tensor], dict[str, Tensor]]:
    """-c - beta log sigmoid(log odds(c) - log odds(r)), for mean log-probabilities c and r of a token.

    odds(x) = e^x / (1 - e^x). Options: beta, lambda of https://arxiv.org/abs/2403.07691.
    """
    chosen, rejected = pairs.means
    log_odds = [mean - torch.log(-torch.expm1(mean.clamp(max=_LARGEST_MEAN))) for mean in pairs.means]
    ratio = log_odds[0] - log_odds[1]
    loss = -chosen - options.beta * F.logsigmoid(ratio)
    return loss, (options.beta * chosen, options.beta * rejected), {"nll_chosen": -chosen, "log_odds_ratio": ratio}


def kto(pairs: Pairs, options: PreferenceOptions) -> tuple[Tensor, tuple[Tensor, Tensor], dict[str, Tensor]]:
    """The mean of d (1 - sigmoid(beta (c - z))) and u (1 - sigmoid(beta (z - r))), for log-ratios c and r.

    z is the baseline, an estimate of KL(model || reference). Options: beta, desirable_weight d, undesirable_weight u
    (https://arxiv.org/abs/2402.01306).
    """
    chosen, rejected = pairs.log_ratios
    of_chosen = options.desirable_weight * torch.sigmoid(options.beta * (pairs.baseline - chosen))
    of_rejected = options.undesirable_weight * torch.sigmoid(options.beta * (rejected - pairs.baseline))
    rewards = options.beta * chosen, options.beta * rejected
    return (of_chosen + of_rejected) / 2, rewards, {"kl": pairs.baseline}


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of a formula, called like `cross_entropy`: the sum over pairs, not over tokens.

    targets: labels [T], already shifted, -100 outside of the answers; PREFERENCE [T], 1 for tokens of chosen answers
        and their prompts, -1 for those of rejected ones, 0 in padding; with `needs_reference`, REFERENCE [T], whose
        sums over documents are the log-probabilities of the reference model; with `needs_baseline`, BASELINE, whose
        first value is that of `Pairs`.
    """

    name: str
    objective: Objective
    options: PreferenceOptions
    needs_reference: bool = False
    needs_baseline: bool = False

    def __call__(
        self, hidden: Tensor, head: AnyHead, targets: Mapping[str, Tensor], layout: SequenceLayout, /
    ) -> LossOutput:
        """Collective if ranks share the row. The terms of the sum are at the first token of each pair.

        Raises ValueError if `targets` lacks an input.
        """
        needed = [PREFERENCE, *[REFERENCE] * self.needs_reference, *[BASELINE] * self.needs_baseline]
        if missing := [name for name in needed if name not in targets]:
            raise ValueError(f"loss {self.name!r} needs {' and '.join(missing)}, got {', '.join(targets)}")
        labels = labels_of(hidden, targets)
        logprobs, trained = token_logprobs(hidden, head, labels), labels != IGNORE
        losses, of_pairs = self._of_pairs(self._pairs(logprobs, trained, targets, layout))
        is_first = (layout.local(layout.whole.positions) == 0) & (targets[PREFERENCE] > 0)
        # Tokens of padding get the number after the last pair.
        number = (document_of(layout) // 2).clamp(max=len(losses))

        def at_first(values: Tensor) -> Tensor:
            return F.pad(values, (0, 1)).index_select(0, number).masked_fill(~is_first, 0.0)

        per_token = at_first(losses)
        values = TokenValues(is_first, {name: at_first(value.detach()) for name, value in of_pairs.items()}, None)
        detached = per_token.detach()
        return LossOutput(per_token.sum(), detached.float(), token_metrics(detached, values), logprobs.detach(), values)

    def empty_metrics(self, device: torch.device) -> dict[str, Tensor]:
        """The metrics of no pairs, for ranks without any."""
        none = torch.zeros(0, dtype=torch.float64, device=device)
        _, of_pairs = self._of_pairs(Pairs(*[none] * len(fields(Pairs))))
        return token_metrics(none, TokenValues(none.bool(), of_pairs, None))

    def _of_pairs(self, pairs: Pairs) -> tuple[Tensor, dict[str, Tensor]]:
        """(losses, metrics by name), [P] each."""
        losses, (chosen, rejected), means = self.objective(pairs, self.options)
        return losses, {
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "reward_margin": chosen - rejected,
            "reward_accuracy": (chosen > rejected).double(),
            "logprobs_chosen": pairs.chosen,
            "logprobs_rejected": pairs.rejected,
            **means,
        }

    def _pairs(self, logprobs: Tensor, trained: Tensor, targets: Mapping[str, Tensor], layout: SequenceLayout) -> Pairs:
        reference = targets[REFERENCE] if self.needs_reference else torch.zeros_like(logprobs)
        terms = torch.stack([logprobs.double(), reference.double(), trained.double()])
        num_pairs = len(layout.whole.lengths) // 2
        sums = document_sums(terms, layout)[:, : 2 * num_pairs]
        (chosen, reference_chosen, num_chosen), (rejected, reference_rejected, num_rejected) = (
            sums[:, side::2].unbind() for side in (0, 1)
        )
        baseline = targets[BASELINE][:1].double() if self.needs_baseline else sums.new_zeros(1)
        return Pairs(
            chosen,
            rejected,
            reference_chosen,
            reference_rejected,
            num_chosen.clamp(min=1.0),
            num_rejected.clamp(min=1.0),
            baseline.expand(num_pairs),
        )


@torch.no_grad()
def score_answers(
    hidden: Tensor, head: AnyHead, targets: Mapping[str, Tensor], _: SequenceLayout | None = None
) -> LossOutput:
    """The log-probabilities of labels, `LossOutput.logprobs`, and their sum; no gradient."""
    logprobs = token_logprobs(hidden, head, labels_of(hidden, targets))
    return LossOutput(logprobs.double().sum(), logprobs, {}, logprobs)


def _smoothed(margin: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


# By name, with the usual beta of each.
PREFERENCE_LOSSES: Mapping[str, PreferenceLoss] = MappingProxyType(
    {
        "dpo": PreferenceLoss("dpo", dpo, PreferenceOptions(beta=0.1), needs_reference=True),
        "orpo": PreferenceLoss("orpo", orpo, PreferenceOptions(beta=0.1)),
        "kto": PreferenceLoss("kto", kto, PreferenceOptions(beta=0.1), needs_reference=True, needs_baseline=True),
        "simpo": PreferenceLoss("simpo", simpo, PreferenceOptions(beta=2.0)),
    }
)
