"""Log-probabilities of given tokens from hidden states and the head's weight, fused or in plain torch.

T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from xorl.core.loss.output import IGNORE
from xorl.core.nn.tensor import join_columns
from xorl.kernels.linear_ce import linear_cross_entropy
from xorl.kernels.vocabulary import Vocabulary


def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    *,
    logits_fp32: bool,
    whole_logits: bool,
    vocab: Vocabulary | None = None,
) -> Tensor:
    """log p(label) [T] in fp32 (fp64 if `hidden` is fp64), differentiable; 0 for labels of -100.

    Arguments as for `cross_entropy`. With a trained head, this costs one more matrix product than `cross_entropy`,
    because the backward pass recomputes the logits; with a frozen head it costs the same.
    """
    if whole_logits:
        logits = full_logits(hidden, head_weight, logits_fp32, vocab)
        return -F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    _, logprobs = linear_cross_entropy(hidden, head_weight, labels, logits_fp32=logits_fp32, vocab=vocab)
    return logprobs


def full_logits(hidden: Tensor, head_weight: Tensor, logits_fp32: bool, vocab: Vocabulary | None) -> Tensor:
    """Logits [T, V] in fp32 (fp64 if `hidden` is fp64), from operands in the dtype of `hidden`.

    Without logits_fp32, the logits are first rounded to that dtype. Collective if ranks share the vocabulary.
    """
    weight, wide = head_weight.to(hidden.dtype), torch.promote_types(hidden.dtype, torch.float32)
    logits = F.linear(hidden.to(wide), weight.to(wide)) if logits_fp32 else F.linear(hidden, weight)
    logits = logits.to(wide)
    return logits if vocab is None else join_columns(logits, vocab.size, vocab.group)
