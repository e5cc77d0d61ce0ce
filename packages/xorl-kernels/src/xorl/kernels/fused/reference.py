"""The plain twins: what each fused kernel computes, in torch, on any device and in any floating-point dtype.

Shapes: B rows, V vocabulary.
"""

import torch
from torch import Tensor

IGNORE = -100


def cross_entropy_rows(
    logits: Tensor, labels: Tensor, token_weight: Tensor | None, gradient: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row, and where asked for its gradient, computed in fp32 (fp64 for fp64 logits).

    Args:
        logits: [B, V].
        labels: [B] int64; -100 is ignored.
        token_weight: [B], multiplies the rows of the gradient; None means 1. The losses are not multiplied.
        gradient: [B, V] in any dtype, overwritten with the gradient by the logits; may be `logits`. None: not wanted.

    Returns:
        (loss [B] fp32, or fp64 for fp64 logits; correct [B] bool): 0 and False where the label is ignored. correct
        says that no other logit is larger than the label's, and none before it as large.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    trained = labels != IGNORE
    targets = labels.clamp(min=0)[:, None]  # [B, 1]
    logsumexp = wide.logsumexp(dim=-1, keepdim=True)  # [B, 1]
    loss = (logsumexp - wide.gather(1, targets)).squeeze(1).masked_fill(~trained, 0.0)
    correct = wide.argmax(dim=-1) == labels
    if gradient is not None:
        rows = (wide - logsumexp).exp_()  # [B, V]
        rows.scatter_add_(1, targets, rows.new_full((), -1.0).expand_as(targets))
        if token_weight is not None:
            rows.mul_(token_weight[:, None])
        gradient.copy_(rows.masked_fill_(~trained[:, None], 0.0))
    return loss, correct
