"""Log-probabilities of given tokens from hidden states and the head's weight, fused or in plain torch.

T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from xorl.core.loss.output import IGNORE
from xorl.core.nn.tensor import TensorRanks
from xorl.kernels.fused.reference import capped
from xorl.kernels.head import AnyHead, HeadWeight
from xorl.kernels.linear_ce import linear_cross_entropy


def token_logprobs(hidden: Tensor, head: AnyHead, labels: Tensor) -> Tensor:
    """log p(label) [T] in fp32 (fp64 if `hidden` is fp64), differentiable; 0 for labels of -100.

    Arguments as for `cross_entropy`. With a trained head, this costs one more matrix product than `cross_entropy`,
    because the backward pass recomputes the logits; with a frozen head it costs the same.
    """
    head = HeadWeight.of(head)
    if head.logits.whole:
        return -F.cross_entropy(full_logits(hidden, head), labels, ignore_index=IGNORE, reduction="none")
    _, logprobs = linear_cross_entropy(hidden, head, labels)
    return logprobs


def full_logits(hidden: Tensor, head: HeadWeight) -> Tensor:
    """Logits [T, V] in fp32 (fp64 if `hidden` is fp64), from operands in the dtype of `hidden`.

    A head that does not keep logits in fp32 first rounds them to that dtype. Collective if ranks share the vocabulary.
    """
    weight, wide = head.weight.to(hidden.dtype), torch.promote_types(hidden.dtype, torch.float32)
    logits = F.linear(hidden.to(wide), weight.to(wide)) if head.logits.fp32 else F.linear(hidden, weight)
    whole = TensorRanks(head.vocab.group).join_columns(logits.to(wide), head.vocab.size)
    return capped(whole, head.logits.softcap)
