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

    Hyperparameters are not part of it: they are a function of the configuration and the step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._optimizer = optimizer
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in named_parameters}

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor of the state, creating those that the first step would create."""
        self._materialise()
        return {
            f"{self._names[parameter]}.{key}": value
            for parameter, values in self._optimizer.state.items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy `state` into the tensors that `state_dict` returns; those loaded in place are left as they are."""
        for name, tensor in self.state_dict().items():
            if state[name] is not tensor:
                tensor.copy_(state[name])

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
            if "step" in values:
                values["step"].zero_()
