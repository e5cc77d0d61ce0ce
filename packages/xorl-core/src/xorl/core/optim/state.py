"""The optimizer's state as a flat mapping of tensors, named by parameter, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class MakesState(Protocol):
    """An optimizer that can create its state without a step."""

    def materialise(self) -> None: ...


class OptimizerState:
    """`{parameter name}.{state name}` -> tensor, sharded as the parameter is.

    Hyperparameters are not part of it: they are a function of the configuration and the step. A number that the
    optimizer of somebody else keeps, such as its count of steps, is a 0-dim tensor here.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._optimizer = optimizer
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in named_parameters}

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor and number of the state, creating those that the first step would create."""
        self._materialise()
        return {
            f"{self._names[parameter]}.{key}": value if isinstance(value, Tensor) else _as_tensor(value)
            for parameter, values in self._optimizer.state.items()
            for key, value in values.items()
            if isinstance(value, (Tensor, int, float))
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy `state` into the tensors that `state_dict` returns; those loaded in place are left as they are."""
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
        """Let the optimizer create its state; those of torch do by a step, made so that it changes no parameter."""
        if self._optimizer.state:
            return
        if isinstance(self._optimizer, MakesState):
            self._optimizer.materialise()
            return
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                assert parameter.grad is None, "state is created before the first backward pass"
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
