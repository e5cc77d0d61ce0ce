"""The optimizer state as a flat mapping of tensors, named by parameter, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class SupportsMaterialise(Protocol):
    """An optimizer that can create its state without taking a step."""

    def materialise(self) -> None: ...


class OptimizerState:
    """Maps `{parameter name}.{state name}` to a tensor that is sharded like the parameter.

    Hyperparameters are not included: they follow from the configuration and the step. Plain numbers, which other
    optimizers may keep as step counts, become 0-dim tensors.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._optimizer = optimizer
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in named_parameters}

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors and numbers of the state, which is created first if the optimizer has not stepped yet."""
        self._materialise()
        return {
            f"{self._names[parameter]}.{key}": value if isinstance(value, Tensor) else _as_tensor(value)
            for parameter, values in self._optimizer.state.items()
            for key, value in values.items()
            if isinstance(value, (Tensor, int, float))
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy `state` into the optimizer's tensors. Skips tensors that are the optimizer's own."""
        self._materialise()
        for parameter, values in self._optimizer.state.items():
            for key, value in values.items():
                name = f"{self._names[parameter]}.{key}"
                if isinstance(value, Tensor):
                    if state[name] is not value:
                        value.copy_(state[name])
                elif isinstance(value, (int, float)):
                    values[key] = state[name].item()

    @torch.no_grad()
    def _materialise(self) -> None:
        """Create the optimizer's state. torch's optimizers create it in a step, taken here with learning rate 0."""
        if self._optimizer.state:
            return
        if isinstance(self._optimizer, SupportsMaterialise):
            self._optimizer.materialise()
            return
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    raise ValueError("optimizer: create its state before the first backward pass")
                parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for values in self._optimizer.state.values():
            if isinstance(values.get("step"), Tensor):
                values["step"].zero_()
            elif "step" in values:
                values["step"] = 0


def _as_tensor(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)
