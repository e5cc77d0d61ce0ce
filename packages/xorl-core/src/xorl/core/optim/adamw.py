"""AdamW in two forms: torch's own, in the parameters' dtype, and one whose states and parameters may be bf16."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from xorl.core.optim.local import first_element, local
from xorl.kernels.optim import Noise, adamw_

BETAS = (0.9, 0.999)
EPS = 1e-8


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW: states in the dtype of the parameters, which take the gradients in their own dtype too."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter; a gradient that was accumulated in a wider dtype is rounded once."""
        assert closure is None, "the gradient is there before the step"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                    rounded, parameter.grad = parameter.grad.to(parameter.dtype), None
                    parameter.grad_dtype = parameter.dtype
                    parameter.grad = rounded
        super().step()


class AnyPrecisionAdamW(torch.optim.Optimizer):
    """AdamW on fp32 or bf16 parameters with states of `state_dtype`; what is kept in bf16 is rounded stochastically.

    The arithmetic is fp32, so fp32 parameters with fp32 states get AdamW's own update. Rounding to nearest would leave
    a bf16 weight where it is whenever an update is below 1/512 of it, and the mean square, which moves by a thousandth
    a step, almost always; stochastic rounding moves them rightly on average (Zamirai et al., 2021, arXiv:2010.06192).
    The random bits depend on the parameter's key, the step and the element's place in the whole parameter alone.

    Groups need `keys`, one for each parameter, from `noise_key`. As torch's fused optimizers do, it changes nothing in
    a step for which `found_inf` is not zero, and reads that on the device.
    """

    found_inf: Tensor | None = None

    def __init__(
        self, params: Iterable[dict[str, Any]], lr: float, *, state_dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "betas": BETAS, "eps": EPS})
        self._state_dtype = state_dtype
        for group in self.param_groups:
            group["firsts"] = [first_element(parameter) for parameter in group["params"]]

    def materialise(self) -> None:
        """Create the state that the first step would create, without a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                init_adamw(self.state[parameter], parameter, self._state_dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; elementwise, so each rank does its shards."""
        assert closure is None, "the gradient is there before the step"
        self.materialise()
        for group in self.param_groups:
            step_adamw_(group, self.state, self.found_inf)


def noise_key(seed: int, name: str) -> int:
    """The key of a parameter's random bits."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


def init_adamw(state: dict[str, Tensor], parameter: Tensor, dtype: torch.dtype) -> None:
    """Put AdamW's state for a parameter into an empty `state`; one that is there stays."""
    if not state:
        state["step"] = torch.zeros((), dtype=torch.int64, device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)


def step_adamw_(group: Mapping[str, Any], states: Mapping[Tensor, dict[str, Tensor]], found_inf: Tensor | None) -> None:
    """AdamW on one group of parameters on one device."""
    numbered = zip(group["params"], group["keys"], group["firsts"], strict=True)
    with_gradient = [(p, key, first) for p, key, first in numbered if p.grad is not None]
    if not with_gradient:
        return
    skip = skip_flag(found_inf, local(with_gradient[0][0]).device)
    steps = count_steps_([states[parameter] for parameter, _, _ in with_gradient], skip)
    counts = steps.double()
    corrections = torch.stack([1 - beta**counts for beta in group["betas"]], dim=1).float()  # [parameters, 2]
    for index, (parameter, key, first) in enumerate(with_gradient):
        state = states[parameter]
        adamw_(
            local(parameter),
            local(parameter.grad).contiguous(),
            local(state["exp_avg"]),
            local(state["exp_avg_sq"]),
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            corrections=corrections[index],
            skip=skip,
            noise=Noise(key, first, state["step"]),
        )


def skip_flag(found_inf: Tensor | None, device: torch.device) -> Tensor:
    """0-dim: not zero where the step changes nothing. Parameters in host memory have the host wait for it."""
    return torch.zeros((), device=device) if found_inf is None else found_inf.to(device)


def count_steps_(states: list[dict[str, Tensor]], skip: Tensor) -> Tensor:
    """Count one more step in every state, unless it is skipped, and return the counts as one tensor."""
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, (skip == 0).long())
    return torch.stack(steps)
