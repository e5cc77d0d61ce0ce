"""Next-token cross-entropy. T tokens, D model width, V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from xorl.core.loss.head import full_logits
from xorl.core.loss.metrics import token_metrics
from xorl.core.loss.output import IGNORE, LossOutput, TokenValues
from xorl.kernels.head import AnyHead, HeadWeight
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import chunk_rows, linear_cross_entropy_scores, linear_cross_entropy_sum


def cross_entropy(
    hidden: Tensor,
    head: AnyHead,
    targets: Mapping[str, Tensor],
    _: SequenceLayout | None = None,
) -> LossOutput:
    """Sum of -log p(label) over the tokens whose `labels` entry is not -100.

    Args:
        hidden: [T, D].
        head: the weight [V, D], alone or with options. Unless they ask for whole logits, a fused kernel computes the
            gradient in the forward pass, so only `sum` can be backpropagated, and only once.
        targets: labels [T] int64, already shifted; other entries are ignored.
    """
    return weighted_cross_entropy(hidden, head, {"labels": labels_of(hidden, targets)})


def labels_of(hidden: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    """The labels [T, ..] of the tokens of `hidden` [T, D]. Raises ValueError if they are missing or are not T."""
    if "labels" not in targets:
        raise ValueError(f"targets: there are no labels among {', '.join(targets) or 'them'}; add labels [T]")
    labels = targets["labels"]
    if labels.shape[:1] != hidden.shape[:1]:
        raise ValueError(
            f"labels must have one entry for each of the {len(hidden)} tokens of hidden, got shape {[*labels.shape]}"
        )
    return labels


def weighted_cross_entropy(
    hidden: Tensor,
    head: AnyHead,
    targets: Mapping[str, Tensor],
    _: SequenceLayout | None = None,
) -> LossOutput:
    """Sum of -weight * log p(label), with optional `weights` [T] in `targets`: any real numbers, 1 by default.

    Other arguments as for `cross_entropy`. A token of weight 0 is not trained, but its log-probability is returned.
    Labels and weights may be [T, K]: the loss sums over all K, and a token is trained if any of its labels is.
    """
    head, labels, weights = HeadWeight.of(head), *_labels_and_weights(hidden, targets)
    if labels.dim() == 2:
        return _several_labels(hidden, head, labels, weights)
    if head.logits.whole:
        logits = full_logits(hidden, head)
        unweighted = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
        total = (unweighted if weights is None else unweighted * weights).sum()
        unweighted = unweighted.detach()
    else:
        total, unweighted = linear_cross_entropy_sum(hidden, head, labels, token_weight=weights)
    trained = labels != IGNORE
    if weights is not None:
        trained = trained & (weights != 0)
    per_token = unweighted if weights is None else unweighted * weights
    values = TokenValues(trained, {}, None)
    return LossOutput(total, per_token, token_metrics(per_token, values), -unweighted, values)


def _labels_and_weights(hidden: Tensor, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """The labels, as `labels_of`, and their weights, of the same shape. Raises ValueError for another shape."""
    labels, weights = labels_of(hidden, targets), targets.get("weights")
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(f"weights must have shape {list(labels.shape)}, as labels; got {list(weights.shape)}")
    return labels, weights


def _several_labels(hidden: Tensor, head: HeadWeight, labels: Tensor, weights: Tensor | None) -> LossOutput:
    """`weighted_cross_entropy` with labels [T, K]; forward and backward hold the logits of one chunk at a time."""
    size = chunk_rows(len(hidden), torch.float32.itemsize * head.vocab.size)
    parts = [
        checkpoint(_label_logprobs, *chunk, head, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(hidden.split(size), labels.split(size), strict=True)
    ]
    logprobs = torch.cat(cast(list[Tensor], parts))
    trained = labels != IGNORE
    if weights is not None:
        trained = trained & (weights != 0)
    per_token = -(logprobs if weights is None else logprobs * weights).sum(dim=1)
    values = TokenValues(trained.any(dim=1), {}, None)
    metrics = token_metrics(per_token, values)
    return LossOutput(per_token.sum(), per_token.detach(), metrics, logprobs.detach(), values)


def _label_logprobs(hidden: Tensor, labels: Tensor, head: HeadWeight) -> Tensor:
    """log p(label) [T, K]; 0 for labels of -100."""
    logits = full_logits(hidden, head)
    ignored = labels == IGNORE
    logprobs = logits.gather(1, labels.masked_fill(ignored, 0)) - logits.logsumexp(dim=1, keepdim=True)
    return logprobs.masked_fill(ignored, 0.0)


@torch.no_grad()
def score_tokens(
    hidden: Tensor,
    head: AnyHead,
    targets: Mapping[str, Tensor],
    _: SequenceLayout | None = None,
) -> LossOutput:
    """Cross-entropy for evaluation, with `metrics["correct"]` [T] bool: whether the label is the most likely token.

    It is False for ignored labels, and for those of weight 0. Arguments as for `weighted_cross_entropy`; no gradient.
    """
    head, labels, weights = HeadWeight.of(head), *_labels_and_weights(hidden, targets)
    if head.logits.whole:
        logits = full_logits(hidden, head)
        per_token = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
        correct = logits.argmax(-1) == labels
    else:
        per_token, correct = linear_cross_entropy_scores(hidden, head, labels)
    logprobs = -per_token
    if weights is not None:
        per_token, correct = per_token * weights, correct & (weights != 0)
    return LossOutput(per_token.sum(), per_token, {"correct": correct}, logprobs)
