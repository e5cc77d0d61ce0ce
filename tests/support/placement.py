"""Tiny models placed on ranks in the ways that tests compare, and the comparison."""

import os
from collections.abc import Mapping
from functools import cache

import torch
import torch._inductor.lowering  # compilation would import it in each rank
from torch import Tensor
from torch.distributed.tensor import DTensor

from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.models import Decoder
from xorl.core.parallel import ParallelModel, ParallelPolicy, parallelize

LAYOUTS = {
    # name: (mode, ranks, shard size, replicate size, reshard after forward)
    "none": ("none", 1, -1, -1, True),
    "ddp-1": ("ddp", 1, -1, -1, True),
    "ddp-2": ("ddp", 2, -1, -1, True),
    "ddp-4": ("ddp", 4, -1, -1, True),
    "zero3-1": ("fsdp2", 1, -1, -1, True),
    "zero3-2": ("fsdp2", 2, -1, -1, True),
    "zero3-3": ("fsdp2", 3, -1, -1, True),
    "zero3-4": ("fsdp2", 4, -1, -1, True),
    "zero2-2": ("fsdp2", 2, -1, -1, False),
    "zero2-4": ("fsdp2", 4, -1, -1, False),
    "hsdp-2x2": ("fsdp2", 4, 2, 2, True),
    "offload-2": ("fsdp2", 2, -1, -1, True),
}
RECOMPUTE = {
    # name: (what, reentrant, number of layers)
    "none": ("none", False, None),
    "operation": ("operation", False, None),
    "layer": ("layer", False, None),
    "first layer": ("layer", False, 1),
    "reentrant": ("layer", True, None),
    "mlp": (("mlp",), False, None),
}


def num_ranks(layout: str) -> int:
    return LAYOUTS[layout][1]


def place(model: Decoder, layout: str, recompute: str = "none", **policy: object) -> ParallelModel:
    """Place a model of the meta device on this job's ranks, filled from seed 0; `policy` is the rest of the policy."""
    mode, world_size, shard_size, replicate_size, reshard = LAYOUTS[layout]
    dims = ParallelDims.resolve(mode, world_size, shard_size=shard_size, replicate_size=replicate_size)
    parts, reentrant, num_layers = RECOMPUTE[recompute]

    def fill(module: torch.nn.Module) -> None:
        assert isinstance(module, Decoder)
        module.init_weights(0, device=torch.device("cpu"))

    whole_policy = ParallelPolicy(
        data_parallel_mode=mode,
        reshard_after_forward=reshard,
        cpu_offload=layout == "offload-2",
        recompute=parts,
        recompute_num_layers=num_layers,
        reentrant_recompute=reentrant,
        **policy,
    )
    return parallelize(model, mesh_of(dims), whole_policy, device=torch.device("cpu"), fill=fill)


def mesh_of(dims: ParallelDims) -> Mesh:
    """The mesh of this process for such sizes; collective at first. Each has groups, whose connections add up."""
    return _mesh(dims, os.getpid())


@cache
def _mesh(dims: ParallelDims, pid: int) -> Mesh:
    return Mesh(dims, "cpu")


def whole(tensor: Tensor | None) -> Tensor:
    """A copy of all of a tensor; collective where it is sharded."""
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def assert_same(reference: Mapping[str, Tensor], measured: Mapping[str, Tensor], limit: float = 1e-6) -> None:
    """Fail where a tensor's difference exceeds `limit` of its norm."""
    assert set(reference) == set(measured)
    for name, tensor in reference.items():
        difference = (measured[name].float() - tensor.float()).norm() / tensor.float().norm()
        assert difference <= limit, f"{name} differs by {difference:.2e}"
