"""The optimizer state as a flat mapping of tensors, named by parameter, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from xorl.ckpt.errors import CheckpointError


@runtime_checkable
class SupportsMaterialise(Protocol):
    """An optimizer that can create its state without taking a step."""

    def materialise(self) -> None: ...


class OptimizerState:
    """Maps `{parameter name}.{state name}` to a tensor that is sharded like the parameter.

    Plain numbers, such as the step counts of some optimizers, become 0-dim tensors. `with_groups` includes the numbers
    of the parameter groups, such as the learning rate, which loading then restores, as `param_groups.{index}.{name}`;
    otherwise they are left to the caller.

    Raises CheckpointError for parameters without a name, and for an optimizer whose state is not tensors and numbers.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        with_groups: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in named_parameters}
        self._with_groups = with_groups
        unnamed = sum(parameter not in self._names for group in optimizer.param_groups for parameter in group["params"])
        if unnamed:
            raise CheckpointError(
                f"state: {unnamed} parameters of the optimizer {type(optimizer).__name__} have no name; pass the "
                "module that owns them as a part of the state too"
            )

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors and numbers of the state, which is created first if the optimizer has not stepped yet."""
        self._materialise()
        state: dict[str, Tensor] = {}
        for parameter, values in self._optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, (Tensor, int, float)):
                    state[f"{self._names[parameter]}.{key}"] = _as_tensor(value)
                elif value is not None:
                    raise CheckpointError(
                        f"state: {type(self._optimizer).__name__} keeps a {type(value).__name__} as {key}; only "
                        "tensors and numbers can be saved"
                    )
        return state | {name: _as_tensor(group[key]) for name, group, key in self._group_numbers()}

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
        for name, group, key in self._group_numbers():
            if isinstance(group[key], Tensor):
                group[key].copy_(state[name])
            else:
                group[key] = state[name].item()

    def _group_numbers(self) -> list[tuple[str, dict[str, Any], str]]:
        if not self._with_groups:
            return []
        return [
            (f"param_groups.{index}.{key}", group, key)
            for index, group in enumerate(self._optimizer.param_groups)
            for key, value in group.items()
            if isinstance(value, (Tensor, int, float)) and not isinstance(value, bool)
        ]

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
                    raise CheckpointError("optimizer: create its state before the first backward pass")
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


def _as_tensor(number: Tensor | float) -> Tensor:
    if isinstance(number, Tensor):
        return number
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)
