"""AdamW for fp32 and bf16 parameters and states, sharded or not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from xorl.core.optim.decay import by_decay, note_local_rows_, rows_of
from xorl.core.shards import local
from xorl.kernels.optim import adamw_
from xorl.kernels.torch_private import add_tensor_

BETAS = (0.9, 0.999)
EPS = 1e-8


class AdamW(torch.optim.Optimizer):
    """AdamW in fp32 arithmetic, with states in `state_dtype` (None: the dtype of each parameter).

    If a group has `keys`, one from `noise_key` for each parameter, bf16 parameters and states are rounded
    stochastically. Rounding to nearest would drop every update below 1/512 of a bf16 weight, and almost every update
    of the mean square, which changes by about 0.1% per step. Stochastic rounding is unbiased (Zamirai et al., 2021,
    arXiv:2010.06192). The random bits depend only on the parameter's key, the step and the element's index in the whole
    parameter. Without keys, this is torch's AdamW, rounded to nearest.

    Like torch's fused optimizers, it divides gradients by `grad_scale`, skips the update if `found_inf` is not zero,
    and reads both on the device. A step may overwrite the gradients.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, *, state_dtype: torch.dtype | None = None) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "betas": BETAS, "eps": EPS})
        self._state_dtype = state_dtype
        note_local_rows_(self.param_groups)

    @torch.no_grad()
    def materialise(self) -> None:
        """Create the optimizer state without taking a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter] = self._new_state(parameter, group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; elementwise, so each rank updates only its own shards."""
        if closure is not None:
            raise ValueError("closure: closures are not supported; compute the gradients before the step")
        self.materialise()
        for group in self.param_groups:
            self._step_group(group)

    def _new_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        # The random generator takes an integer step; otherwise the state has the dtypes of torch.optim.AdamW.
        step_dtype = torch.int64 if "keys" in group else torch.float32
        return {
            "step": torch.zeros((), dtype=step_dtype, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, dtype=self._state_dtype),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=self._state_dtype),
        }

    def _step_group(self, group: Mapping[str, Any]) -> None:
        """Update one group, whose parameters are on one device."""
        indices = [index for index, parameter in enumerate(group["params"]) if parameter.grad is not None]
        if not indices:
            return
        states = {index: self.state[group["params"][index]] for index in indices}
        grad_scale, skip = step_controls(self, local(group["params"][indices[0]]).device)
        count_steps_(list(states.values()), skip)
        for decay, ranges in by_decay(group, indices).items():
            held = [(group["params"][index], states[index], local_rows.rows) for index, local_rows in ranges]
            noises = None
            if "keys" in group:
                noises = [rows.noise(group["keys"][index], states[index]["step"]) for index, rows in ranges]
            adamw_(
                [rows_of(parameter, rows) for parameter, _, rows in held],
                [rows_of(parameter.grad, rows).contiguous() for parameter, _, rows in held],
                [rows_of(state["exp_avg"], rows) for _, state, rows in held],
                [rows_of(state["exp_avg_sq"], rows) for _, state, rows in held],
                [state["step"] for _, state, _ in held],
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=decay,
                grad_scale=grad_scale,
                skip=skip,
                noises=noises,
            )


def noise_key(seed: int, name: str) -> int:
    """The random key of the parameter `name`, in [0, 2**31)."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


class ScaledOptimizer(Protocol):
    """An optimizer with torch's attributes for gradient scaling, which are tensors on the device."""

    grad_scale: Tensor | None
    found_inf: Tensor | None


class StepControls(NamedTuple):
    """What kernels read in a step, as 0-dim fp32 tensors on the parameters' device; `skip` is set if it is not zero."""

    grad_scale: Tensor | None
    skip: Tensor


def step_controls(optimizer: ScaledOptimizer, device: torch.device) -> StepControls:
    """The optimizer's scaling attributes on `device`. Copying them to the CPU synchronises."""
    scale, flag = optimizer.grad_scale, optimizer.found_inf
    skip = torch.zeros((), device=device) if flag is None else flag.to(device, torch.float32)
    return StepControls(None if scale is None else scale.to(device, torch.float32), skip)


def count_steps_(states: list[dict[str, Tensor]], skip: Tensor) -> None:
    """Increment the step of every state, unless the update is skipped."""
    steps = [state["step"] for state in states]
    add_tensor_(steps, (skip == 0).to(steps[0].dtype))
