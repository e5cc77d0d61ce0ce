"""Next-token cross-entropy. T tokens, D model width, V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

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
        targets: labels [T] int64, already shifted.
        logits_fp32: keep logits in fp32, or round them to the dtype of `hidden` first; the softmax and the sum are
            fp32 either way.
        whole_logits: plain torch on the logits of all tokens at once, [T, V], in place of the fused kernel, which holds
            those of a chunk and takes the gradient in the forward pass. Only `sum` may be backpropagated then, once.
    """
    labels = targets["labels"]
    if whole_logits:
        logits = _whole_logits(hidden, head_weight, logits_fp32)
        per_token = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
        return LossOutput(per_token.sum(), per_token.detach(), {})
    total, per_token = linear_cross_entropy_sum(hidden, head_weight, labels, logits_fp32=logits_fp32)
    return LossOutput(total, per_token, {})


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
        logits = _whole_logits(hidden, head_weight, logits_fp32)
        per_token = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
        correct = logits.argmax(-1) == labels
    else:
        per_token, correct = linear_cross_entropy_scores(hidden, head_weight, labels, logits_fp32=logits_fp32)
    return LossOutput(per_token.sum(), per_token, {"correct": correct})


def _whole_logits(hidden: Tensor, head_weight: Tensor, logits_fp32: bool) -> Tensor:
    """[T, V] in fp32 (fp64 for fp64): products of values in the dtype of `hidden`, rounded to it where asked to."""
    weight, wide = head_weight.to(hidden.dtype), torch.promote_types(hidden.dtype, torch.float32)
    logits = F.linear(hidden.to(wide), weight.to(wide)) if logits_fp32 else F.linear(hidden, weight)
    return logits.to(wide)
