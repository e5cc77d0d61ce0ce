"""Stochastic gradient descent for sharded and unsharded parameters; torch's fused SGD does not support sharded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from xorl.core.optim.adamw import step_controls
from xorl.core.optim.decay import by_decay, note_local_rows_, rows_of
from xorl.core.shards import local
from xorl.kernels.optim import descend_


class SGD(torch.optim.Optimizer):
    """parameter -= lr * (gradient + weight_decay * parameter), in fp32, rounded to nearest; stateless.

    Like torch's fused optimizers, it divides gradients by `grad_scale`, skips the update if `found_inf` is not zero,
    and reads both on the device.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[dict[str, Any]], lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        note_local_rows_(self.param_groups)

    def materialise(self) -> None:
        """Do nothing: SGD has no state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; elementwise, so each rank updates only its own shards."""
        if closure is not None:
            raise ValueError("closure: closures are not supported; compute the gradients before the step")
        for group in self.param_groups:
            parameters = group["params"]
            indices = [index for index, parameter in enumerate(parameters) if parameter.grad is not None]
            if not indices:
                continue
            grad_scale, skip = step_controls(self, local(parameters[indices[0]]).device)
            for decay, ranges in by_decay(group, indices).items():
                for index, (rows, *_) in ranges:
                    descend_(
                        rows_of(parameters[index], rows),
                        rows_of(parameters[index].grad, rows).contiguous(),
                        decay=group["lr"] * decay,
                        rate=group["lr"],
                        grad_scale=grad_scale,
                        skip=skip,
                        noise=None,
                    )
