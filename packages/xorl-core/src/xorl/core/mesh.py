"""Degrees of parallelism (`ParallelDims`), and the device mesh built from them (`Mesh`).

Unused axes exist with size 1, so callers never need to check whether an axis exists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DataParallelMode = Literal["none", "ddp", "fsdp2"]

# Outermost first. The innermost axes communicate the most, so they connect neighbouring ranks.
AXES = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp")


@dataclass(frozen=True)
class ParallelDims:
    """The size of each parallel axis; their product is the number of processes."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"parallel size {field.name} must be at least 1, not {getattr(self, field.name)}")

    @property
    def world_size(self) -> int:
        """The number of processes that these degrees need."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def dp(self) -> int:
        """The number of data-parallel ranks; each reads different data."""
        return self.dp_replicate * self.dp_shard

    @classmethod
    def resolve(
        cls,
        mode: DataParallelMode,
        world_size: int,
        *,
        shard_size: int = -1,
        replicate_size: int = -1,
        pp: int = 1,
        ring: int = 1,
        ulysses: int = 1,
        tp: int = 1,
    ) -> ParallelDims:
        """Resolve the options to axis sizes for `world_size` processes.

        A size of -1 is inferred. Under fsdp2, `shard_size` then takes all remaining ranks, and `replicate_size` is 1
        unless `shard_size` is given. Raises ValueError, naming the options, if the product is not the world size.
        """
        for option, size in (("shard", shard_size), ("replicate", replicate_size)):
            if size < 1 and size != -1:
                raise ValueError(f"train.data_parallel_{option}_size must be -1 or at least 1, not {size}")
        others = pp * ring * ulysses * tp
        if world_size % others:
            raise ValueError(
                f"{world_size} processes cannot be divided by the model-parallel sizes (train.pipeline_parallel_size "
                f"{pp} x ringattn {ring} x ulysses {ulysses} x tensor {tp} = {others})"
            )
        dp_size = world_size // others
        if mode == "none" and dp_size > 1:
            raise ValueError(
                f"train.data_parallel_mode none runs one data-parallel rank, but {dp_size} were started: "
                "use ddp or fsdp2, or start one process"
            )
        if mode == "ddp":
            shard = 1 if shard_size == -1 else shard_size
            replicate = dp_size if replicate_size == -1 else replicate_size
        elif shard_size == -1:
            replicate = 1 if replicate_size == -1 else replicate_size
            shard = dp_size // replicate
        else:
            shard = shard_size
            replicate = dp_size // shard if replicate_size == -1 else replicate_size
        if mode == "ddp" and shard != 1:
            raise ValueError(
                f"train.data_parallel_shard_size {shard_size} needs train.data_parallel_mode fsdp2, not ddp"
            )
        if shard * replicate != dp_size:
            raise ValueError(
                f"{dp_size} data-parallel ranks ({world_size} processes / {others}) are not "
                f"train.data_parallel_replicate_size {replicate} x train.data_parallel_shard_size {shard}: "
                "change the sizes (-1 infers a size) or the number of processes"
            )
        return cls(pp=pp, dp_replicate=replicate, dp_shard=shard, ring=ring, ulysses=ulysses, tp=tp)


class Mesh:
    """The processes of the job arranged along `AXES`, and the submeshes and groups used by data parallelism.

    Requires an initialised default process group of `dims.world_size` processes. Construction is collective.
    """

    def __init__(self, dims: ParallelDims, device_type: str) -> None:
        if dist.get_world_size() != dims.world_size:
            raise ValueError(f"{dims} needs {dims.world_size} processes, but {dist.get_world_size()} were started")
        self.dims = dims
        self.device_type = device_type
        sizes = tuple(getattr(dims, axis) for axis in AXES)
        self.device_mesh: DeviceMesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
        self._dp = self.device_mesh["dp_replicate", "dp_shard"]._flatten("dp")

    @property
    def dp_rank(self) -> int:
        """The index of the data shard that this process reads, in [0, dp_size)."""
        return self._dp.get_local_rank()

    @property
    def dp_size(self) -> int:
        """The number of data shards."""
        return self.dims.dp

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The processes over which losses, counts and replicated gradients are summed."""
        return self._dp.get_group()

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh that parameters are sharded over: one axis, or (replicate, shard) under HSDP."""
        if self.dims.dp_replicate > 1:
            return self.device_mesh["dp_replicate", "dp_shard"]
        return self.device_mesh["dp_shard"]
