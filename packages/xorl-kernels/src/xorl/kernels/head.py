"""The weight of an output head, and how logits follow from it, as tuples, which torch.compile can make.

Shapes: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from xorl.kernels.layout import RankGroup
from xorl.kernels.vocabulary import Vocabulary


class LogitOptions(NamedTuple):
    """How logits are computed.

    Attributes:
        fp32: keep logits in fp32 instead of rounding them to the dtype of the hidden states. The softmax is computed in
            fp32 either way.
        softcap: logits become softcap * tanh(logits / softcap), computed in fp32 from logits as above; None: no cap.
        whole: compute losses in plain torch from the logits of all tokens at once, [T, V]. The functions of `linear_ce`
            ignore it: they hold the logits of one chunk of tokens.
        vocab: of all ranks, if each has a part of the weight; None: the weight is whole.
    """

    fp32: bool = True
    softcap: float | None = None
    whole: bool = False
    vocab: Vocabulary | None = None


class HeadWeight(NamedTuple):
    """The weight of a head, [V, D] or this rank's part of it, and how logits follow from it."""

    weight: Tensor
    logits: LogitOptions = LogitOptions()

    @staticmethod
    def of(head: AnyHead) -> HeadWeight:
        """`head` itself, or a plain weight with the default options."""
        return head if isinstance(head, HeadWeight) else HeadWeight(head)

    @property
    def vocab(self) -> Vocabulary:
        """The whole vocabulary, and the ranks that share it."""
        return self.logits.vocab or Vocabulary(len(self.weight), RankGroup(0, 1, ""))


AnyHead = Tensor | HeadWeight
"""A head; a plain weight [V, D] stands for one with the default options."""
