"""How FSDPTrainer divides a user's module: the options, and the parts whose parameters are gathered together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"]
AutoWrapPolicy = Literal["size", "transformer"]

# As in torch's own size policy: a part of 0.4 GB in fp32 keeps the links busy, smaller ones pay for latency.
DEFAULT_MIN_NUM_PARAMS = int(1e8)


@dataclass(frozen=True)
class Sharding:
    """The options of FSDPTrainer, which documents them. Raises ValueError for values that contradict each other."""

    sharding_strategy: ShardingStrategy
    auto_wrap_policy: AutoWrapPolicy | None
    min_num_params: int | None
    transformer_layer_cls: type[nn.Module] | Collection[type[nn.Module]] | None
    cpu_offload: bool
    shard_size: int | None

    def __post_init__(self) -> None:
        if self.sharding_strategy not in get_args(ShardingStrategy):
            known = ", ".join(get_args(ShardingStrategy))
            raise ValueError(f"sharding_strategy {self.sharding_strategy!r} is unknown; use one of {known}")
        if self.auto_wrap_policy not in (None, *get_args(AutoWrapPolicy)):
            raise ValueError(
                f"auto_wrap_policy {self.auto_wrap_policy!r} is unknown; use 'size', 'transformer' or None"
            )
        if (self.auto_wrap_policy == "transformer") != (self.transformer_layer_cls is not None):
            raise ValueError("auto_wrap_policy='transformer' and transformer_layer_cls=... need each other")
        if self.min_num_params is not None and self.auto_wrap_policy != "size":
            raise ValueError("min_num_params needs auto_wrap_policy='size'")
        if self.shard_size is not None and self.sharding_strategy != "HYBRID_SHARD":
            raise ValueError("shard_size needs sharding_strategy='HYBRID_SHARD'")

    def units(self, model: nn.Module) -> list[nn.Module]:
        """The parts of `model` to shard on their own, innermost first; what is left is sharded with `model` itself."""
        if self.auto_wrap_policy == "size":
            minimum = DEFAULT_MIN_NUM_PARAMS if self.min_num_params is None else self.min_num_params
            return _large_parts(model, minimum)
        if self.auto_wrap_policy == "transformer":
            assert self.transformer_layer_cls is not None
            classes = self.transformer_layer_cls
            return _layers(model, (classes,) if isinstance(classes, type) else tuple(classes))
        return []


def _large_parts(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """The smallest parts that hold `min_num_params` parameters beside those of smaller parts already taken."""
    holders = _holders(model)
    units: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> set[nn.Parameter]:
        if module in seen:
            return set()
        seen.add(module)
        # MultiheadAttention reads the weights of its output projection without calling it: nothing would gather them.
        whole = isinstance(module, nn.MultiheadAttention)
        left = set(module.parameters(recurse=whole))
        for child in () if whole else module.children():
            left |= visit(child)
        large = sum(parameter.numel() for parameter in left) >= max(1, min_num_params)
        if large and module is not model and _is_called(module) and _owns_its_parameters(module, holders):
            units.append(module)
            return set()
        return left

    visit(model)
    return units


def _layers(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, classes) and path]
    names = ", ".join(kind.__name__ for kind in classes)
    if not found:
        known = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        raise ValueError(f"transformer_layer_cls {names}: the model has no such layer; its classes are {known}")
    holders = _holders(model)
    for path, module in found:
        if not _owns_its_parameters(module, holders):
            raise ValueError(
                f"transformer_layer_cls {names}: {path} shares a parameter with a module outside of it, which is not "
                "gathered with it; name a class that holds the two, or use auto_wrap_policy='size'"
            )
    return [module for _, module in sorted(found, key=lambda item: -item[0].count("."))]


def _is_called(module: nn.Module) -> bool:
    """Containers as ModuleList have no forward pass at which their parameters could be gathered."""
    return type(module).forward is not nn.Module.forward


def _owns_its_parameters(module: nn.Module, holders: dict[nn.Parameter, list[nn.Module]]) -> bool:
    inside = set(module.modules())
    return all(inside.issuperset(holders[parameter]) for parameter in module.parameters())


def _holders(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """Every module that has each parameter as its own: several, where weights are tied."""
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, []).append(module)
    return holders
