"""The formulas of policy-gradient losses, as functions of the log-probabilities of T tokens.

Each docstring gives the loss of one token. p is the token's probability under the model, r the ratio of p to its
probability under the policy that sampled it, and A its advantage. sg stops the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from xorl.core.loss.policy import PolicyOptions, PolicyTokens, exp_of_log_ratio


@dataclass(frozen=True)
class ClipOptions(PolicyOptions):
    """The bounds of the clipped ratio, as ratios and not as distances from 1.

    Inputs of the same names override these options, with a value for each token.
    """

    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2

    def __post_init__(self) -> None:
        _check_order("clip_low_threshold", self.clip_low_threshold, "clip_high_threshold", self.clip_high_threshold)


@dataclass(frozen=True)
class CispoOptions(ClipOptions):
    """The bounds of `ppo`, with wider defaults, because clipping here limits the gradient instead of zeroing it."""

    clip_low_threshold: float = 0.0
    clip_high_threshold: float = 4.0


@dataclass(frozen=True)
class GspoOptions(ClipOptions):
    """The bounds of `ppo`, applied to the ratio of a whole document."""

    @property
    def marks_trained(self) -> tuple[str, ...]:
        return ("sequence_ratio_mask",)


@dataclass(frozen=True)
class ClippedPolicyOptions(PolicyOptions):
    """Options of `policy_loss`: clipping the ratio, and three corrections, off by default.

    eps_clip, eps_clip_high: the distances of the bounds from 1.
    eps_clip_c: dual clipping: if the advantage is negative, the loss is at most eps_clip_c * |A|
        (https://arxiv.org/abs/1912.09729).
    use_tis: truncated importance sampling: multiply the loss by the ratio of `logprobs` to `rollout_logprobs` (computed
        by an inference engine), clipped to [tis_clip_low, tis_clip_high]
        (https://fengyao.notion.site/off-policy-rl). This ratio has no gradient; r is relative to `logprobs`.
    icepop_beta: mask tokens whose ratio is outside [1/beta, beta] (https://arxiv.org/abs/2602.15763).
    """

    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    eps_clip_c: float | None = None
    use_tis: bool = False
    tis_clip_low: float = 0.1
    tis_clip_high: float = 2.0
    icepop_beta: float | None = None

    def __post_init__(self) -> None:
        _check_not_negative("eps_clip", self.eps_clip)
        _check_not_negative("eps_clip_high", self.eps_clip_high)
        _check_above_1("eps_clip_c", self.eps_clip_c)
        _check_above_1("icepop_beta", self.icepop_beta)
        _check_order("tis_clip_low", self.tis_clip_low, "tis_clip_high", self.tis_clip_high)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rollout_logprobs",) if self.use_tis else ()


@dataclass(frozen=True)
class DroOptions(PolicyOptions):
    """beta: weight of the penalty on the distance from the policy that sampled the tokens."""

    beta: float = 0.05

    def __post_init__(self) -> None:
        _check_not_negative("beta", self.beta)


@dataclass(frozen=True)
class DrgrpoOptions(PolicyOptions):
    """Options of `drgrpo`: clipping the ratio, and a penalty on the divergence from a reference policy.

    clip_low, clip_high: the distances of the bounds from 1.
    beta: weight of the penalty; with 0, `ref_logprobs` is not needed.
    kl_type: the estimator of the divergence (http://joschu.net/blog/kl-approx.html).
    ratio_type: token, the ratio of each token; sequence, the geometric mean over the trained tokens of its document.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    beta: float = 0.1
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    ratio_type: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        _check_not_negative("clip_low", self.clip_low)
        _check_not_negative("clip_high", self.clip_high)
        _check_not_negative("beta", self.beta)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("ref_logprobs",) if self.beta else ()


def importance_sampling(tokens: PolicyTokens, _: PolicyOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """-r A."""
    return -exp_of_log_ratio(tokens.log_ratio()) * tokens.advantages, {}


def ppo(tokens: PolicyTokens, options: ClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r) A) (https://arxiv.org/abs/1707.06347)."""
    ratio = exp_of_log_ratio(tokens.log_ratio())
    loss, clipped = _clipped_loss(ratio, tokens.advantages, *_thresholds(tokens, options))
    return loss, {"clip_fraction": clipped}


def gspo(tokens: PolicyTokens, options: GspoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(s A, clip(s) A), s = sg(document ratio) p / sg(p) (https://arxiv.org/abs/2507.18071, GSPO-token).

    A document's ratio is the geometric mean over its tokens with a nonzero `sequence_ratio_mask`, and 1 if there are
    none. Without this input, the mean is over the document's trained tokens.
    """
    in_ratio = tokens.masked("sequence_ratio_mask") != 0 if "sequence_ratio_mask" in tokens.targets else tokens.trained
    of_document = tokens.document_mean(tokens.log_ratio().detach(), in_ratio)
    ratio = exp_of_log_ratio(of_document + (tokens.logprobs - tokens.logprobs.detach()))
    loss, clipped = _clipped_loss(ratio, tokens.advantages, *_thresholds(tokens, options))
    return loss, {"clip_fraction": clipped}


def policy_loss(tokens: PolicyTokens, options: ClippedPolicyOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of `ppo`, at most -c A if A is negative, multiplied by the weights of TIS and IcePop."""
    ratio = exp_of_log_ratio(tokens.log_ratio())
    loss, clipped = _clipped_loss(ratio, tokens.advantages, 1 - options.eps_clip, 1 + options.eps_clip_high)
    means: dict[str, Tensor] = {}
    if options.eps_clip_c is not None:
        upper_bound = torch.where(tokens.advantages < 0, -options.eps_clip_c * tokens.advantages, torch.inf)
        clipped = clipped | (loss > upper_bound)
        loss = torch.minimum(loss, upper_bound)
    if options.use_tis:
        mismatch = exp_of_log_ratio(tokens.sampled - tokens.masked("rollout_logprobs"))
        weight = mismatch.clamp(options.tis_clip_low, options.tis_clip_high)
        loss = loss * weight
        means |= {"tis_mean": mismatch, "tis_clip_fraction": weight != mismatch}
    if options.icepop_beta is not None:
        outside = (ratio < 1 / options.icepop_beta) | (ratio > options.icepop_beta)
        loss = loss.masked_fill(outside, 0.0)
        means["icepop_fraction"] = outside
    return loss, {"clip_fraction": clipped} | means


def cispo(tokens: PolicyTokens, options: CispoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(clip(r)) log p A (https://arxiv.org/abs/2506.13585)."""
    ratio = exp_of_log_ratio(tokens.log_ratio()).detach()
    low, high = _thresholds(tokens, options)
    bounded = ratio.clamp(low, high)
    return -bounded * tokens.logprobs * tokens.advantages, {"clip_fraction": bounded != ratio}


def dro(tokens: PolicyTokens, options: DroOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """-(log p A - beta/2 (log r)^2) (https://arxiv.org/abs/2405.19107)."""
    penalty = 0.5 * options.beta * tokens.log_ratio().square()
    return penalty - tokens.logprobs * tokens.advantages, {}


def drgrpo(tokens: PolicyTokens, options: DrgrpoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r) A) + beta KL(model || reference) (https://arxiv.org/abs/2503.20783).

    With `ratio_type` sequence, r is defined as in https://arxiv.org/abs/2507.18071.
    """
    log_ratio = tokens.log_ratio()
    if options.ratio_type == "sequence":
        log_ratio = tokens.document_mean(log_ratio, tokens.trained)
    ratio = exp_of_log_ratio(log_ratio)
    loss, clipped = _clipped_loss(ratio, tokens.advantages, 1 - options.clip_low, 1 + options.clip_high)
    means = {"clip_fraction": clipped}
    if options.beta:
        log_ratio_to_ref = tokens.logprobs - tokens.masked("ref_logprobs")
        divergence = {
            "k1": log_ratio_to_ref,
            "k2": 0.5 * log_ratio_to_ref.square(),
            "k3": exp_of_log_ratio(-log_ratio_to_ref) - 1 + log_ratio_to_ref,
        }[options.kl_type]
        loss = loss + options.beta * divergence
        means["kl_ref"] = divergence
    return loss, means


def _thresholds(tokens: PolicyTokens, options: ClipOptions) -> tuple[Tensor, Tensor]:
    """(low, high), [T] each: from the inputs of these names if given, else from the options."""
    names = ("clip_low_threshold", "clip_high_threshold")
    low, high = (
        tokens.masked(name) if name in tokens.targets else torch.full_like(tokens.advantages, getattr(options, name))
        for name in names
    )
    return low, high


def _clipped_loss(
    ratio: Tensor, advantages: Tensor, low: Tensor | float, high: Tensor | float
) -> tuple[Tensor, Tensor]:
    """(-min(r A, clip(r) A), whether clipping changed the loss), [T] each."""
    # torch accepts numbers and tensors here, but its stubs do not accept a union of both.
    clipped_ratio = ratio.clamp(low, high)  # pyright: ignore[reportCallIssue, reportArgumentType]
    unclipped_loss, clipped_loss = -ratio * advantages, -clipped_ratio * advantages
    return torch.maximum(unclipped_loss, clipped_loss), clipped_loss > unclipped_loss


def _check_order(low_name: str, low: float, high_name: str, high: float) -> None:
    if not 0 <= low <= high:
        raise ValueError(f"0 <= {low_name} <= {high_name} must hold, got {low} and {high}")


def _check_not_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{name} must not be negative, got {value}")


def _check_above_1(name: str, value: float | None) -> None:
    if value is not None and not value > 1:
        raise ValueError(f"{name} must be above 1, got {value}")
