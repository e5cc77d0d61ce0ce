"""DDPTrainer and FSDPTrainer: train a user-defined module, replicated or sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.parallel import ParallelModel
from xorl.core.parallel.ddp import replicate
from xorl.core.parallel.fsdp import shard
from xorl.core.runtime import local_rank
from xorl.train.module.loader import Batch
from xorl.train.module.trainer import Trainer, TrainerOptions
from xorl.train.module.units import AutoWrapPolicy, Sharding, ShardingStrategy


class _DistributedTrainer(Trainer):
    """The part that both trainers share: the device mesh, and reductions over its ranks."""

    _parallel: ParallelModel

    def _count_ranks(self) -> int:
        if not dist.is_initialized():
            raise RuntimeError(f"{type(self).__name__} needs a process group; call setup_distributed() first")
        return dist.get_world_size()

    def _accumulation(self, *, is_last: bool) -> AbstractContextManager[None]:
        return self._parallel.accumulation(is_last=is_last)

    def _reduce_(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        dist.all_reduce(tensor, op=op, group=self._parallel.mesh.dp_group)
        return tensor


class DDPTrainer(_DistributedTrainer):
    """Trains a replica of the model on every rank, starting from rank 0's weights. Takes `Trainer`'s options.

    Gradients are reduced once per optimizer step, in the backward pass of the last micro-batch.
    """

    def _place(self, model: nn.Module) -> nn.Module:
        mesh = Mesh(ParallelDims.resolve("ddp", self.num_ranks), self.device.type)
        self._parallel = ParallelModel(model, replicate(model.to(self.device), mesh), mesh)
        return self._parallel.forward


class FSDPTrainer(_DistributedTrainer):
    """Trains a model whose parameters, gradients and optimizer state are sharded over the ranks (FSDP2).

    Training starts from rank 0's weights. The model is sharded in place, unit by unit, so it need not fit on a device.

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
        mesh = Mesh(ParallelDims.resolve("fsdp2", self.num_ranks, shard_size=shard_size), self.device.type)
        on_cpu = self.device.type == "cpu"
        shard(
            model,
            mesh.fsdp,
            units,
            param_dtype=torch.bfloat16 if self._gathers_bf16 and not on_cpu else None,
            reshard_after_forward=self._sharding.sharding_strategy != "SHARD_GRAD_OP",
            cpu_offload=self._sharding.cpu_offload and not on_cpu,
        )
        self._parallel = ParallelModel(model, model, mesh)
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
