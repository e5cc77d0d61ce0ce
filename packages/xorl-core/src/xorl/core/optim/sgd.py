"""Stochastic gradient descent over whole and sharded parameters; torch's fused one takes whole ones only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from xorl.core.optim.adamw import controls
from xorl.core.optim.local import local
from xorl.kernels.optim import descend_


class SGD(torch.optim.Optimizer):
    """parameter -= lr * (gradient + weight_decay * parameter), in fp32, rounded to nearest; it keeps no state.

    As torch's fused optimizers do, it divides gradients by `grad_scale`, changes nothing in a step for which
    `found_inf` is not zero, and reads both on the device.
    """

    grad_scale: Tensor | None = None
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
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            grad_scale, skip = controls(self, local(parameters[0]).device)
            for parameter in parameters:
                descend_(
                    local(parameter),
                    local(parameter.grad).contiguous(),
                    decay=group["lr"] * group["weight_decay"],
                    rate=group["lr"],
                    grad_scale=grad_scale,
                    skip=skip,
                    noise=None,
                )
