"""Next-token cross-entropy. T tokens, D model width, V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from xorl.core.loss.head import full_logits
from xorl.core.loss.metrics import token_metrics
from xorl.core.loss.output import IGNORE, LossOutput
from xorl.kernels.linear_ce import linear_cross_entropy_scores, linear_cross_entropy_sum


def cross_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Mapping[str, Tensor],
    *,
    logits_fp32: bool = True,
    whole_logits: bool = False,
) -> LossOutput:
    """Sum of -log p(label) over the tokens whose `labels` entry is not -100.

    Args:
        hidden: [T, D].
        head_weight: [V, D].
        targets: labels [T] int64, already shifted; nothing else is read.
        logits_fp32: keep logits in fp32, or round them to the dtype of `hidden` first; the softmax and the sum are
            fp32 either way.
        whole_logits: plain torch on the logits of all tokens at once, [T, V], in place of the fused kernel, which holds
            those of a chunk and takes the gradient in the forward pass. Only `sum` may be backpropagated then, once.
    """
    labels_alone = {"labels": targets["labels"]}
    return weighted_cross_entropy(hidden, head_weight, labels_alone, logits_fp32=logits_fp32, whole_logits=whole_logits)


def weighted_cross_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Mapping[str, Tensor],
    *,
    logits_fp32: bool = True,
    whole_logits: bool = False,
) -> LossOutput:
    """Sum of -weight * log p(label): `weights` [T] in `targets` are any real numbers, and 1 where there are none.

    Others as for `cross_entropy`. A token of weight 0 is not trained, and has its log-probability all the same.
    """
    labels, weights = targets["labels"], targets.get("weights")
    if whole_logits:
        logits = full_logits(hidden, head_weight, logits_fp32)
        unweighted = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
        total = (unweighted if weights is None else unweighted * weights).sum()
        unweighted = unweighted.detach()
    else:
        total, unweighted = linear_cross_entropy_sum(
            hidden, head_weight, labels, token_weight=weights, logits_fp32=logits_fp32
        )
    trained = labels != IGNORE
    if weights is not None:
        trained = trained & (weights != 0)
    per_token = unweighted if weights is None else unweighted * weights
    return LossOutput(total, per_token, token_metrics(per_token, trained), -unweighted)


@torch.no_grad()
def score_tokens(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Mapping[str, Tensor],
    *,
    logits_fp32: bool = True,
    whole_logits: bool = False,
) -> LossOutput:
    """Cross-entropy for evaluation, with `metrics["correct"]` [T] bool: the label is the most likely token.

    False where nothing is trained. Arguments as for `cross_entropy`; no gradient.
    """
    labels = targets["labels"]
    if whole_logits:
        logits = full_logits(hidden, head_weight, logits_fp32)
        per_token = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
        correct = logits.argmax(-1) == labels
    else:
        per_token, correct = linear_cross_entropy_scores(hidden, head_weight, labels, logits_fp32=logits_fp32)
    return LossOutput(per_token.sum(), per_token, {"correct": correct}, -per_token)
