"""Next-token cross-entropy. T tokens, D model width, V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from xorl.core.loss.output import IGNORE, LossOutput
from xorl.kernels.linear_ce import linear_cross_entropy


def cross_entropy(hidden: Tensor, head_weight: Tensor, targets: Mapping[str, Tensor]) -> LossOutput:
    """Sum of -log p(label) over the tokens whose `labels` entry is not -100.

    hidden [T, D], head_weight [V, D], targets["labels"] [T] int64, already shifted. Logits, log-sum-exp and the sum
    are fp32.
    """
    per_token, _ = linear_cross_entropy(hidden, head_weight, targets["labels"])
    return LossOutput(per_token.sum(), per_token, {})


@torch.no_grad()
def score_tokens(
    hidden: Tensor, head_weight: Tensor, targets: Mapping[str, Tensor], *, chunk_tokens: int = 2048
) -> LossOutput:
    """Cross-entropy for evaluation, with `metrics["correct"]` [T] bool: the label is the most likely token.

    False where nothing is trained. Same shapes as `cross_entropy`; no gradient.
    """
    labels = targets["labels"]
    per_token, _ = linear_cross_entropy(hidden, head_weight, labels)
    weight = head_weight.to(hidden.dtype)
    predicted = torch.cat([(chunk @ weight.T).argmax(-1) for chunk in hidden.split(chunk_tokens)])
    return LossOutput(per_token.sum(), per_token, {"correct": (predicted == labels) & (labels != IGNORE)})
