"""Log-probabilities of given tokens from hidden states and the head's weight, fused or plain: what losses are made of.

T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from xorl.core.loss.output import IGNORE
from xorl.kernels.linear_ce import linear_cross_entropy


def token_logprobs(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, *, logits_fp32: bool, whole_logits: bool
) -> Tensor:
    """log p(label) [T] in fp32 (fp64 for fp64), differentiable; 0 where the label is -100.

    Arguments as for `cross_entropy`. With a trained head this takes one matrix product more than `cross_entropy`, since
    the logits are computed again in the backward pass; with a frozen head it takes as many.
    """
    if whole_logits:
        logits = full_logits(hidden, head_weight, logits_fp32)
        return -F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    _, logprobs = linear_cross_entropy(hidden, head_weight, labels, logits_fp32=logits_fp32)
    return logprobs


def full_logits(hidden: Tensor, head_weight: Tensor, logits_fp32: bool) -> Tensor:
    """[T, V] in fp32 (fp64 for fp64): products of values in the dtype of `hidden`, rounded to it where asked to."""
    weight, wide = head_weight.to(hidden.dtype), torch.promote_types(hidden.dtype, torch.float32)
    logits = F.linear(hidden.to(wide), weight.to(wide)) if logits_fp32 else F.linear(hidden, weight)
    return logits.to(wide)
