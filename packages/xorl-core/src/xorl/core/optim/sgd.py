"""Stochastic gradient descent over whole and sharded parameters; torch's fused one takes whole ones only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from xorl.core.optim.local import local


class SGD(torch.optim.Optimizer):
    """parameter -= lr * (gradient + weight_decay * parameter), in the parameter's dtype; it keeps no state.

    As torch's fused optimizers do, it changes nothing in a step for which `found_inf` is not zero, and reads that on
    the device. A step overwrites the gradients.
    """

    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[dict[str, Any]], lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    def materialise(self) -> None:
        """There is no state to create."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; elementwise, so each rank does its shards."""
        assert closure is None, "the gradient is there before the step"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                values, update = local(parameter), local(parameter.grad)
                update.add_(values, alpha=group["weight_decay"])
                if self.found_inf is not None:
                    update.masked_fill_(self.found_inf.bool(), 0.0)
                values.add_(update, alpha=-group["lr"])
