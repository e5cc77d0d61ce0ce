"""The order in which a rank computes the passes of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Tensors = tuple[Tensor, ...]


class InOrder:
    """Each backward pass right after its forward pass."""

    def run(self, count: int, forward: Callable[[int], Tensors], backward: Callable[[int, Tensors], None]) -> None:
        """Compute the passes of `count` micro-batches.

        forward: index -> what the backward pass starts from, such as the loss. backward: index, what its forward pass
            returned.
        """
        for index in range(count):
            backward(index, forward(index))
