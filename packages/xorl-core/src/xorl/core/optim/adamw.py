"""AdamW on fp32 or bf16 parameters and states, on whole and on sharded ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from xorl.core.optim.local import first_element, local
from xorl.kernels.optim import Noise, adamw_

BETAS = (0.9, 0.999)
EPS = 1e-8


class AdamW(torch.optim.Optimizer):
    """AdamW in fp32 arithmetic, with states of `state_dtype`; None means that of each parameter.

    A group may have `keys`, one for each of its parameters, from `noise_key`. Then what is kept in bf16 is rounded
    stochastically: rounding to nearest would leave a bf16 weight where it is whenever an update is below 1/512 of it,
    and the mean square, which moves by a thousandth a step, almost always; stochastic rounding moves them rightly on
    average (Zamirai et al., 2021, arXiv:2010.06192). The random bits depend on the parameter's key, the step and the
    element's place in the whole parameter alone. Without keys it is torch's AdamW, rounded to nearest.

    As torch's fused optimizers do, it divides gradients by `grad_scale`, changes nothing in a step for which
    `found_inf` is not zero, and reads both on the device; a step may overwrite the gradients.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, *, state_dtype: torch.dtype | None = None) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "betas": BETAS, "eps": EPS})
        self._state_dtype = state_dtype
        for group in self.param_groups:
            if "keys" in group:
                group["firsts"] = [first_element(parameter) for parameter in group["params"]]

    @torch.no_grad()
    def materialise(self) -> None:
        """Create the state that the first step would create, without a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter] = self._new_state(parameter, group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; elementwise, so each rank does its shards."""
        assert closure is None, "the gradient is there before the step"
        self.materialise()
        for group in self.param_groups:
            self._step_group(group)

    def _new_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        # Random bits are drawn by an integer; without them the state is that of torch.optim.AdamW.
        count = torch.int64 if "keys" in group else torch.float32
        return {
            "step": torch.zeros((), dtype=count, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, dtype=self._state_dtype),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=self._state_dtype),
        }

    def _step_group(self, group: Mapping[str, Any]) -> None:
        """AdamW on one group of parameters on one device."""
        places = [index for index, parameter in enumerate(group["params"]) if parameter.grad is not None]
        if not places:
            return
        parameters = [group["params"][place] for place in places]
        states = [self.state[parameter] for parameter in parameters]
        grad_scale, skip = controls(self, local(parameters[0]).device)
        count_steps_(states, skip)
        noises = None
        if "keys" in group:
            noises = [
                Noise(group["keys"][place], group["firsts"][place], state["step"])
                for place, state in zip(places, states, strict=True)
            ]
        adamw_(
            [local(parameter) for parameter in parameters],
            [local(parameter.grad).contiguous() for parameter in parameters],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [state["step"] for state in states],
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            grad_scale=grad_scale,
            skip=skip,
            noises=noises,
        )


def noise_key(seed: int, name: str) -> int:
    """The key of a parameter's random bits."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


class Controlled(Protocol):
    """An optimizer that is told on the device what to divide gradients by, and whether to change anything."""

    grad_scale: Tensor | None
    found_inf: Tensor | None


class Controls(NamedTuple):
    """What the kernels take: 0-dim fp32 tensors beside the parameters."""

    grad_scale: Tensor | None
    skip: Tensor


def controls(optimizer: Controlled, device: torch.device) -> Controls:
    """The optimizer's two attributes on `device`; host memory has the host wait for them."""
    scale, flag = optimizer.grad_scale, optimizer.found_inf
    skip = torch.zeros((), device=device) if flag is None else flag.to(device, torch.float32)
    return Controls(None if scale is None else scale.to(device, torch.float32), skip)


def count_steps_(states: list[dict[str, Tensor]], skip: Tensor) -> None:
    """Count one more step in every state, unless it is skipped."""
    steps = [state["step"] for state in states]
    # By name: torch's Python function takes a tensor without dimensions for a number, and waits to read it.
    torch.ops.aten._foreach_add_.Tensor(steps, (skip == 0).to(steps[0].dtype))
