"""The optimizer state as a flat mapping of tensors, named by parameter, for checkpoints."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from xorl.ckpt.errors import CheckpointError
from xorl.ckpt.layout import TensorRecord

_GROUPS = "param_groups"
_MEMBERS = ".params."
# Flags that choose how a step is computed, which may differ on another device; they are neither saved nor restored.
_IMPLEMENTATION = frozenset({"capturable", "differentiable", "foreach", "fused"})


@runtime_checkable
class SupportsMaterialise(Protocol):
    """An optimizer that can create its state without taking a step."""

    def materialise(self) -> None: ...


class OptimizerState:
    """Maps `{parameter name}.{state name}` to a tensor that is sharded like the parameter.

    Plain numbers, such as the step counts of some optimizers, become 0-dim tensors. `with_groups` treats the optimizer
    as torch's own `state_dict` does: a parameter without state, such as a frozen one, is saved without and has none
    after loading, and the hyperparameters of the groups (numbers, flags, and tuples of numbers) are saved and restored
    as `param_groups.{index}.{name}`, for groups of the same parameters. Otherwise state that does not exist yet is
    created, and hyperparameters are left to the caller.

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
        # Becomes the optimizer's once values are loaded into it.
        self._created: dict[Tensor, dict[str, Any]] = {}
        unnamed = sum(parameter not in self._names for parameter in self._parameters())
        if unnamed:
            raise CheckpointError(
                f"state: {unnamed} parameters of the optimizer {type(optimizer).__name__} have no name; pass the "
                "module that owns them as a part of the state too"
            )

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors and numbers of the state. Without groups, it is created first if the optimizer has none yet."""
        if not self._with_groups:
            self._materialise()
        state = {name: _as_tensor(values[key]) for name, values, key in self._values(self._optimizer.state)}
        state |= {name: _as_tensor(group[key]) for name, group, key in self._hyperparameters()}
        return state | {name: torch.zeros((), dtype=torch.bool) for name in self._members()}

    def tensors_to_load(self, saved: Mapping[str, TensorRecord]) -> dict[str, Tensor]:
        """The tensors to copy a checkpoint into, which `load_state_dict` then takes; the optimizer does not change.

        With groups, they follow the records of what was `saved`: they are of the saved parameters only, numbers have
        the saved dtype, and hyperparameters that others than the optimizer add, such as schedulers, are included. The
        optimizer's own numbers must be saved; flags and tuples may be missing, as torch adds some to its optimizers.

        Raises CheckpointError for groups of other parameters than the saved ones, as far as these are on record.
        """
        if not self._with_groups:
            return self.state_dict()
        recorded = {name for name in saved if name.startswith(f"{_GROUPS}.") and _MEMBERS in name}
        if recorded and recorded != set(self._members()):
            raise CheckpointError(
                f"state: the parameter groups of {type(self._optimizer).__name__} have other parameters than in the "
                "checkpoint; give it the same groups in the same order, or its hyperparameters would be mixed up"
            )
        with_state = {name.rpartition(".")[0] for name in saved}
        wanted = [parameter for parameter in self._parameters() if self._names[parameter] in with_state]
        state = self._optimizer.state
        self._created = self._create([parameter for parameter in wanted if not state.get(parameter)])
        held = {parameter: self._created.get(parameter) or state.get(parameter, {}) for parameter in wanted}
        tensors = {
            name: value if isinstance(value := values[key], Tensor) else _receiver(value, saved.get(name))
            for name, values, key in self._values(held)
        }
        tensors |= {
            name: _receiver(group[key], saved.get(name))
            for name, group, key in self._hyperparameters()
            if name in saved or (key in self._optimizer.defaults and _is_number(group[key]))
        }
        prefixes = tuple(f"{_GROUPS}.{index}." for index in range(len(self._optimizer.param_groups)))
        added = [name for name in saved if name.startswith(prefixes) and name not in tensors]
        return tensors | {name: torch.zeros(saved[name].shape, dtype=saved[name].torch_dtype) for name in added}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy `state` into the optimizer's tensors. Skips tensors that are the optimizer's own."""
        if not self._with_groups:
            self._materialise()
        self._optimizer.state.update(self._created)
        with_state = {name.rpartition(".")[0] for name in state}
        for parameter in list(self._optimizer.state):
            if self._with_groups and self._names[parameter] not in with_state:
                del self._optimizer.state[parameter]
        for name, values, key in list(self._values(self._optimizer.state)):
            if not isinstance(values[key], Tensor):
                values[key] = state[name].item()
            elif state[name] is not values[key]:
                values[key].copy_(state[name])
        for index, group in enumerate(self._optimizer.param_groups if self._with_groups else ()):
            prefix = f"{_GROUPS}.{index}."
            for name in state:
                if name.startswith(prefix) and _MEMBERS not in name:
                    key = name.removeprefix(prefix)
                    group[key] = _restored(state[name], group.get(key))

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])

    def _values(self, state: Mapping[Tensor, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], str]]:
        """The name of each value in the state of parameters, with where it is held."""
        for parameter, values in state.items():
            for key, value in values.items():
                if isinstance(value, (Tensor, int, float)):
                    yield f"{self._names[parameter]}.{key}", values, key
                elif value is not None:
                    raise CheckpointError(
                        f"state: {type(self._optimizer).__name__} keeps a {type(value).__name__} as {key}; only "
                        "tensors and numbers can be saved"
                    )

    def _members(self) -> list[str]:
        """A name for each group that tells which parameters it has, in any order."""
        groups = self._optimizer.param_groups if self._with_groups else ()
        names = ["\n".join(sorted(self._names[parameter] for parameter in group["params"])) for group in groups]
        digests = [hashlib.blake2b(each.encode(), digest_size=8).hexdigest() for each in names]
        return [f"{_GROUPS}.{index}{_MEMBERS}{digest}" for index, digest in enumerate(digests)]

    def _hyperparameters(self) -> list[tuple[str, dict[str, Any], str]]:
        return [
            (f"{_GROUPS}.{index}.{key}", group, key)
            for index, group in enumerate(self._optimizer.param_groups if self._with_groups else ())
            for key, value in group.items()
            if key != "params" and key not in _IMPLEMENTATION and _is_hyperparameter(value)
        ]

    def _materialise(self) -> None:
        """Create the optimizer's state, if it has none, with step counts of 0."""
        if self._optimizer.state:
            return
        self._optimizer.state.update(self._create(list(self._parameters())))
        for values in self._optimizer.state.values():
            if isinstance(values.get("step"), Tensor):
                values["step"].zero_()
            elif "step" in values:
                values["step"] = 0

    @torch.no_grad()
    def _create(self, parameters: Collection[Tensor]) -> dict[Tensor, dict[str, Any]]:
        """New state for parameters without any; the optimizer stays as it is.

        torch's optimizers create it in a step, taken here with learning rate 0 and gradients of 0.
        """
        if not parameters:
            return {}
        chosen, before = set(parameters), {key for key, values in self._optimizer.state.items() if values}
        gradients = [(parameter, parameter.grad) for parameter in self._parameters()]
        rates = [group["lr"] for group in self._optimizer.param_groups]
        try:
            if isinstance(self._optimizer, SupportsMaterialise):
                self._optimizer.materialise()
            else:
                for group in self._optimizer.param_groups:
                    group["lr"] = 0.0
                for parameter, _ in gradients:
                    parameter.grad = torch.zeros_like(parameter) if parameter in chosen else None
                self._optimizer.step()
        finally:
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            for parameter, gradient in gradients:
                parameter.grad = gradient
        added = {key: self._optimizer.state.pop(key) for key in list(self._optimizer.state) if key not in before}
        return {key: values for key, values in added.items() if key in chosen and values}


def _is_number(value: object) -> bool:
    return isinstance(value, (Tensor, int, float)) and not isinstance(value, bool)


def _is_hyperparameter(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(item is None or isinstance(item, (Tensor, int, float)) for item in value)
    return isinstance(value, bool) or _is_number(value)


def _as_tensor(value: Tensor | float | Sequence[float | None]) -> Tensor:
    """A number as a 0-dim tensor, and a tuple of numbers as a 1-dim one, in which NaN stands for None."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Sequence):
        return torch.tensor([math.nan if item is None else item for item in value], dtype=torch.float64)
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _receiver(value: Tensor | float | Sequence[float | None], saved: TensorRecord | None) -> Tensor:
    """A new tensor to load a hyperparameter into, of the saved type: users write both 1 and 1.0."""
    expected = _as_tensor(value)
    return torch.zeros(expected.shape, dtype=expected.dtype if saved is None else saved.torch_dtype)


def _restored(saved: Tensor, current: object) -> object:
    """A hyperparameter in the form of `current`; tensors in it are changed in place."""
    if isinstance(current, Tensor):
        return current.copy_(saved)
    if saved.ndim == 0:
        return saved.item()
    values = [None if math.isnan(item) else item for item in saved.tolist()]
    held = current if isinstance(current, (tuple, list)) and len(current) == len(values) else values
    pairs = zip(held, saved.unbind(), values, strict=True)
    values = [now.copy_(new) if isinstance(now, Tensor) else value for now, new, value in pairs]
    return values if isinstance(current, list) else tuple(values)
