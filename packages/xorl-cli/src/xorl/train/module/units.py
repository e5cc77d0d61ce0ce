"""How FSDPTrainer divides a module into units: the options, and the modules whose parameters are gathered together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"]
AutoWrapPolicy = Literal["size", "transformer"]

# The default of torch's size policy. A unit of 0.4 GB in fp32 saturates the links; smaller ones are latency-bound.
DEFAULT_MIN_NUM_PARAMS = int(1e8)


@dataclass(frozen=True)
class Sharding:
    """The sharding options, documented in FSDPTrainer. Raises ValueError if they contradict each other."""

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
            raise ValueError("auto_wrap_policy='transformer' and transformer_layer_cls must be given together")
        if self.min_num_params is not None and self.auto_wrap_policy != "size":
            raise ValueError("min_num_params needs auto_wrap_policy='size'")
        if self.shard_size is not None and self.sharding_strategy != "HYBRID_SHARD":
            raise ValueError("shard_size needs sharding_strategy='HYBRID_SHARD'")

    def units(self, model: nn.Module) -> list[nn.Module]:
        """The modules to shard separately, innermost first. Remaining parameters are sharded with `model` itself."""
        if self.auto_wrap_policy == "size":
            minimum = DEFAULT_MIN_NUM_PARAMS if self.min_num_params is None else self.min_num_params
            return _large_modules(model, minimum)
        if self.auto_wrap_policy == "transformer":
            assert self.transformer_layer_cls is not None
            classes = self.transformer_layer_cls
            return _layers(model, (classes,) if isinstance(classes, type) else tuple(classes))
        return []


def _large_modules(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """The smallest modules with `min_num_params` parameters, not counting those of units inside them."""
    owners = _owners(model)
    units: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> set[nn.Parameter]:
        if module in seen:
            return set()
        seen.add(module)
        # MultiheadAttention uses its output projection's weight without calling that module, so FSDP would not gather
        # it: keep the module whole.
        whole = isinstance(module, nn.MultiheadAttention)
        left = set(module.parameters(recurse=whole))
        for child in () if whole else module.children():
            left |= visit(child)
        large = sum(parameter.numel() for parameter in left) >= max(1, min_num_params)
        if large and module is not model and _is_called(module) and _owns_its_parameters(module, owners):
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
        raise ValueError(f"transformer_layer_cls {names}: the model has no such layer; its module classes are {known}")
    owners = _owners(model)
    for path, module in found:
        if not _owns_its_parameters(module, owners):
            raise ValueError(
                f"transformer_layer_cls {names}: {path} shares a parameter with a module outside of it, which would "
                "not be gathered; use a class that contains both modules, or auto_wrap_policy='size'"
            )
    return [module for _, module in sorted(found, key=lambda item: -item[0].count("."))]


def _is_called(module: nn.Module) -> bool:
    """Containers such as ModuleList have no forward pass that could trigger gathering."""
    return type(module).forward is not nn.Module.forward


def _owns_its_parameters(module: nn.Module, owners: dict[nn.Parameter, list[nn.Module]]) -> bool:
    inside = set(module.modules())
    return all(inside.issuperset(owners[parameter]) for parameter in module.parameters())


def _owners(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """The modules that directly contain each parameter: several if weights are tied."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    return owners
