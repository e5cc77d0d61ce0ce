"""DDPTrainer and FSDPTrainer: the trainer of a user's own module, replicated or sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.parallel import ParallelModel, replicate, shard
from xorl.core.runtime import local_rank
from xorl.train.module.loader import Batch
from xorl.train.module.trainer import Trainer, TrainerOptions
from xorl.train.module.units import AutoWrapPolicy, Sharding, ShardingStrategy


class _DistributedTrainer(Trainer):
    """What replicas and shards have in common: the mesh, and sums over its ranks."""

    _parallel: ParallelModel

    def _count_ranks(self) -> int:
        if not dist.is_initialized():
            raise RuntimeError(f"{type(self).__name__} needs the process group: call setup_distributed() first")
        return dist.get_world_size()

    def _accumulation(self, *, is_last: bool) -> AbstractContextManager[None]:
        return self._parallel.accumulation(is_last=is_last)

    def _reduce_(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        dist.all_reduce(tensor, op=op, group=self._parallel.mesh.dp_group)
        return tensor


class DDPTrainer(_DistributedTrainer):
    """Trains a copy of the model on every rank; all start from rank 0's weights. The options are `Trainer`'s.

    Gradients are exchanged once per optimizer step, at its last micro-batch.
    """

    def _place(self, model: nn.Module) -> nn.Module:
        mesh = Mesh(ParallelDims.resolve("ddp", self.num_ranks), self.device.type)
        self._parallel = ParallelModel(model, replicate(model.to(self.device), mesh), mesh)
        return self._parallel.forward


class FSDPTrainer(_DistributedTrainer):
    """Trains a model whose parameters, gradients and optimizer state are sharded over the ranks (FSDP2).

    All start from rank 0's weights, and the model is sharded in place, part by part, so it need not fit on a device.

    sharding_strategy: FULL_SHARD gathers the parameters of a part for its forward pass and again for its backward pass;
    SHARD_GRAD_OP keeps them in between; HYBRID_SHARD is FULL_SHARD within groups of `shard_size` ranks (the default is
    those of one host) that hold copies of each other.
    auto_wrap_policy: the parts that are gathered at a time. "size": the smallest that hold `min_num_params` parameters
    (default 1e8); "transformer": the layers of class `transformer_layer_cls` (one or several); None: the whole model.
    mixed_precision_policy: with "bf16" parameters are also gathered in bf16; they are kept, and gradients reduced, in
    fp32. cpu_offload: parameters, gradients and optimizer state live in host memory, and the optimizer steps there.
    On the CPU neither of the two moves anything: autocast there leaves norms alone, which want one dtype throughout.
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
        self._copy_from_first_rank_(model)
        units = self._sharding.units(model)
        shard_size = self._ranks_of_a_group()
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

    def _ranks_of_a_group(self) -> int:
        """Over how many ranks a copy of the model is sharded. Collective."""
        if self._sharding.sharding_strategy != "HYBRID_SHARD":
            return self.num_ranks
        size = self._sharding.shard_size
        if size is None:
            highest = torch.tensor(local_rank(), device=self.device)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
            size = int(highest) + 1
        if size < 1 or self.num_ranks % size:
            raise ValueError(f"shard_size {size} does not divide the {self.num_ranks} ranks into equal groups")
        return size

    @torch.no_grad()
    def _copy_from_first_rank_(self, model: nn.Module) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            value = tensor.detach().to(self.device)
            dist.broadcast(value, src=0)
            tensor.copy_(value)
