"""Cross-entropy over a vocabulary that ranks share: what each computes from its logits, and how they combine it.

Shapes: B rows, V vocabulary, P ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from xorl.kernels.fused.reference import IGNORE, PartLosses, RowLosses, slope_of_cap
from xorl.kernels.layout import RankGroup
from xorl.kernels.torch_private import all_gather


class Vocabulary(NamedTuple):
    """A vocabulary that ranks share: each has equally many tokens, in order, but the last may have fewer.

    Attributes:
        size: V.
        group: the ranks.
    """

    size: int
    group: RankGroup

    @property
    def share(self) -> int:
        """The number of tokens of a rank, rounded up."""
        return -(-self.size // self.group.size)

    @property
    def held(self) -> range:
        """The tokens of this rank."""
        start = min(self.group.rank * self.share, self.size)
        return range(start, min(start + self.share, self.size))

    def local(self, labels: Tensor) -> Tensor:
        """Labels as indices into this rank's tokens; -1 for those of other ranks, -100 stays."""
        held = self.held
        is_held = (labels >= held.start) & (labels < held.stop)
        return torch.where(is_held, labels - held.start, -1).masked_fill_(labels == IGNORE, IGNORE)


def combine(
    part: PartLosses,
    labels: Tensor,
    token_weight: Tensor | None,
    vocab: Vocabulary,
    results: RowLosses,
    softcap: float | None = None,
) -> None:
    """Fill the `results` of B rows from what each rank knows of them. Collective.

    `label_error` is what is missing from the gradient at the label, times the factor of the row; 0 if another rank has
    the label. A label outside the vocabulary gives a loss and a scale of NaN.
    """
    sent = torch.stack([part.log_sum, part.target, part.largest, part.before])
    by_rank = all_gather(sent, vocab.group.size, vocab.group.name).view(vocab.group.size, *sent.shape)
    log_sums, targets, largest, before = by_rank.unbind(1)  # [P, B]
    trained = labels != IGNORE
    is_known = (labels >= 0) & (labels < vocab.size)
    log_sum = log_sums.logsumexp(0)
    target = targets.amax(0).where(is_known, torch.nan)
    results.loss.copy_((log_sum - target).masked_fill_(~trained, 0.0))
    ranks = torch.arange(vocab.group.size, device=labels.device)[:, None]
    of_lower_ranks = largest.masked_fill(ranks >= labels // vocab.share, -torch.inf).amax(0)
    is_first = (target > of_lower_ranks) & (target > before.amax(0))
    results.correct.copy_(trained & is_first & (target >= largest.amax(0)))
    weight = is_known.to(log_sum.dtype).masked_fill_(~is_known, torch.nan)
    weight = (weight if token_weight is None else weight * token_weight).masked_fill_(~trained, 0.0)
    # As a product, which is 0 if this rank's logits are all far below those of the others.
    results.scale.copy_((weight * (part.shift - log_sum).exp()).masked_fill_(~trained, 0.0))
    exact = torch.expm1(target - log_sum)
    if softcap is not None:
        exact *= slope_of_cap(target, softcap)
    missing = weight * exact - results.scale * part.rounded
    is_held = trained & is_known & (labels // vocab.share == vocab.group.rank)
    results.label_error.copy_(missing.masked_fill_(~is_held, 0.0))
