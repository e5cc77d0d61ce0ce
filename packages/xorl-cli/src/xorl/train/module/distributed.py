"""DDPTrainer and FSDPTrainer: train a user-defined module, replicated or sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Unpack, get_args

import torch
import torch.distributed as dist
from torch import nn

from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.parallel.ddp import replicate
from xorl.core.parallel.fsdp import shard
from xorl.core.runtime import local_rank
from xorl.train.module.loader import Batch
from xorl.train.module.trainer import Trainer, TrainerOptions

ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"]
AutoWrapPolicy = Literal["size", "transformer"]

# The default of torch's size policy. A unit of 0.4 GB in fp32 saturates the links; smaller ones are latency-bound.
DEFAULT_MIN_NUM_PARAMS = int(1e8)


class _DistributedTrainer(Trainer):
    """The part that both trainers share."""

    def _count_ranks(self) -> int:
        if not dist.is_initialized():
            raise RuntimeError(f"{type(self).__name__} needs a process group; call setup_distributed() first")
        return dist.get_world_size()


class DDPTrainer(_DistributedTrainer):
    """Trains a replica of the model on every rank, starting from rank 0's weights. Takes `Trainer`'s options.

    Gradients are reduced once per optimizer step, in the backward pass of the last micro-batch.
    """

    def _place(self, model: nn.Module) -> nn.Module:
        self._mesh = Mesh(ParallelDims.resolve("ddp", self.num_ranks), self.device.type)
        self._replica = replicate(model.to(self.device), self._mesh)
        return self._replica

    def _accumulation(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else self._replica.no_sync()


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


class FSDPTrainer(_DistributedTrainer):
    """Trains a model whose parameters, gradients and optimizer state are sharded over the ranks (FSDP2).

    Training starts from rank 0's weights. The model is sharded in place, unit by unit, so it need not fit on a device.
    Gradients are reduced in every micro-batch, so micro-batches may leave units out, if all ranks leave out the same.

    sharding_strategy: FULL_SHARD gathers the parameters of a unit for its forward pass and again for its backward
    pass. SHARD_GRAD_OP keeps them gathered in between. HYBRID_SHARD is FULL_SHARD within groups of `shard_size` ranks
    (default: the ranks of one host), with a replica of the model in each group.
    auto_wrap_policy: the units that are gathered together. "size": the smallest modules with at least `min_num_params`
    parameters (default 1e8); "transformer": the modules of class `transformer_layer_cls` (one or several); None: the
    whole model.
    mixed_precision_policy: "bf16" also gathers parameters in bf16; they are stored, and gradients reduced, in fp32.
    cpu_offload: keep parameters, gradients and optimizer state in host memory, and run the optimizer there.
    On the CPU, cpu_offload has no effect and parameters are not gathered in bf16: CPU autocast does not cast the inputs
    of norms, which must match their weights.
    options: those of `Trainer`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        loader: Iterable[Batch],
        *,
        sharding_strategy: ShardingStrategy = "FULL_SHARD",
        auto_wrap_policy: AutoWrapPolicy | None = None,
        min_num_params: int | None = None,
        transformer_layer_cls: type[nn.Module] | Collection[type[nn.Module]] | None = None,
        cpu_offload: bool = False,
        shard_size: int | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        self._sharding = Sharding(
            sharding_strategy, auto_wrap_policy, min_num_params, transformer_layer_cls, cpu_offload, shard_size
        )
        self._gathers_bf16 = options.get("mixed_precision_policy") == "bf16"
        super().__init__(model, optimizer_class, loader, **options)

    def _place(self, model: nn.Module) -> nn.Module:
        self._broadcast_from_rank_0_(model)
        units = self._sharding.units(model)
        shard_size = self._shard_size()
        self._mesh = Mesh(ParallelDims.resolve("fsdp2", self.num_ranks, shard_size=shard_size), self.device.type)
        on_cpu = self.device.type == "cpu"
        shard(
            model,
            self._mesh.fsdp,
            units,
            param_dtype=torch.bfloat16 if self._gathers_bf16 and not on_cpu else None,
            reshard_after_forward=self._sharding.sharding_strategy != "SHARD_GRAD_OP",
            cpu_offload=self._sharding.cpu_offload and not on_cpu,
        )
        return model

    def _shard_size(self) -> int:
        """The number of ranks that a replica of the model is sharded over. Collective."""
        if self._sharding.sharding_strategy != "HYBRID_SHARD":
            return self.num_ranks
        size = self._sharding.shard_size
        if size is None:
            highest = torch.tensor(local_rank(), device=self.device)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
            size = int(highest) + 1
        if size < 1 or self.num_ranks % size:
            raise ValueError(f"shard_size: {size} does not divide the number of ranks, {self.num_ranks}")
        return size

    @torch.no_grad()
    def _broadcast_from_rank_0_(self, model: nn.Module) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            value = tensor.detach().to(self.device)
            dist.broadcast(value, src=0)
            tensor.copy_(value)


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
