"""The output head of a decoder, to which a loss may be passed.

Shapes: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TypeVar, overload

from torch import Tensor
from torch.nn import functional as F

from xorl.core.nn.layers import Linear

ResultT = TypeVar("ResultT")


class Head(Linear):
    """The output head: hidden states [T, D] to logits [T, V], or to the result of a loss if one is given."""

    roles = MappingProxyType({"weight": "head", "bias": "bias"})

    @overload
    def forward(self, x: Tensor, loss: None = None) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, loss: Callable[[Tensor, Tensor], ResultT]) -> ResultT: ...

    def forward(self, x: Tensor, loss: Callable[[Tensor, Tensor], ResultT] | None = None) -> ResultT | Tensor:
        hidden, weight = (x, self.weight) if self.adapter is None else self.operands(x)
        return apply_head(hidden, weight, loss)


def apply_head(hidden: Tensor, weight: Tensor, loss: Callable[[Tensor, Tensor], ResultT] | None) -> ResultT | Tensor:
    """Logits [T, V] of hidden states [T, D] with weight [V, D], or the result of the loss for both."""
    return F.linear(hidden, weight.to(hidden.dtype)) if loss is None else loss(hidden, weight)
