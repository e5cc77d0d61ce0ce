"""Degrees of parallelism (`ParallelDims`), and the device mesh built from them (`Mesh`).

Unused axes exist with size 1, so callers never need to check whether an axis exists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from xorl.kernels.arguments import check_at_least, check_choice, check_device_type
from xorl.kernels.layout import RankGroup

DataParallelMode = Literal["none", "ddp", "fsdp2"]
ContextSharding = Literal["all", "ulysses_only", "ring_only", "none"]

# Outermost first. The innermost axes communicate the most, so they connect neighbouring ranks.
AXES = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp")
DATA_AXES = ("dp_replicate", "dp_shard")
CONTEXT_AXES = ("ring", "ulysses")
_SHARDED_CONTEXT: Mapping[ContextSharding, tuple[str, ...]] = MappingProxyType(
    {"all": CONTEXT_AXES, "ulysses_only": ("ulysses",), "ring_only": ("ring",), "none": ()}
)
# Groups and ranks listed in the description of a mesh.
MAX_SHOWN = 4


@dataclass(frozen=True)
class ParallelDims:
    """The size of each parallel axis; their product is the number of processes.

    context_sharding: the context-parallel axes that fsdp2 shards parameters over; over the others, it replicates them.
    tp: the number of ranks that share each matrix of a layer and the vocabulary. They do not share matrices of experts:
        for these, they are further ranks with tokens of their own.
    ep: the number of ranks that share the experts. It divides the ranks that shard the parameters (those that replicate
        them, if they are not sharded), together with those of `tp`; they hold the experts as a second grid of `ep` x
        `num_expert_shards`.
    ep_outside: ranks that shard the same experts are neighbours; False: ranks that share the experts are.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    context_sharding: ContextSharding = "all"
    ep: int = 1
    ep_outside: bool = False

    def __post_init__(self) -> None:
        check_choice("context_sharding", self.context_sharding, ContextSharding)
        for axis in (*AXES, "ep"):
            check_at_least(f"parallel size {axis}", getattr(self, axis), 1)
        axes = self.expert_axes
        if self.size_of(axes) % self.ep:
            sizes = " x ".join(f"{axis} {getattr(self, axis)}" for axis in axes)
            raise ValueError(
                f"ep: {self.ep} does not divide the {self.size_of(axes)} ranks that hold the experts ({sizes}); "
                "change it, or the sizes"
            )

    @property
    def world_size(self) -> int:
        """The number of processes that these degrees need."""
        return self.size_of(AXES)

    @property
    def used(self) -> str:
        """The axes of more than one rank and their sizes, for people; `ep` last, whose ranks are those of others."""
        return " x ".join(f"{axis} {size}" for axis in (*AXES, "ep") if (size := getattr(self, axis)) > 1)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes that parameters are sharded over."""
        return ("dp_shard", *_SHARDED_CONTEXT[self.context_sharding])

    @property
    def replicate_axes(self) -> tuple[str, ...]:
        """The axes whose ranks hold copies of the same parameters and different tokens."""
        return ("dp_replicate", *(axis for axis in CONTEXT_AXES if axis not in self.shard_axes))

    @property
    def num_shards(self) -> int:
        """The number of shards of a parameter."""
        return self.size_of(self.shard_axes)

    @property
    def num_replicas(self) -> int:
        """The number of copies of a shard."""
        return self.size_of(self.replicate_axes)

    @property
    def num_expert_shards(self) -> int:
        """The number of shards of the experts that one rank of the expert axis holds."""
        return self.size_of(self.expert_axes) // self.ep

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes that experts are divided and sharded over."""
        axes = self.replicate_axes if self.divides_replicas else self.shard_axes
        return (*axes, *(["tp"] if self.tp > 1 else []))

    @property
    def divides_replicas(self) -> bool:
        """Whether ranks that hold copies of everything else share the experts."""
        return self.ep > 1 and self.num_shards == 1

    @property
    def num_expert_replicas(self) -> int:
        """The number of copies of a shard of the experts."""
        return self.size_of([axis for axis in self.replicate_axes if axis not in self.expert_axes])

    def size_of(self, axes: Sequence[str]) -> int:
        """The number of ranks along several axes."""
        return math.prod(getattr(self, axis) for axis in axes)

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
        context_sharding: ContextSharding = "all",
        ep: int = 1,
        ep_outside: bool = False,
    ) -> ParallelDims:
        """Resolve the options to axis sizes for `world_size` processes.

        A size of -1 is inferred. Under fsdp2, `shard_size` then takes all remaining ranks, and `replicate_size` is 1
        unless `shard_size` is given. Raises ValueError, naming the options, if the product is not the world size.
        """
        check_choice("mode", mode, DataParallelMode)
        for option, size in (("shard", shard_size), ("replicate", replicate_size)):
            if size < 1 and size != -1:
                raise ValueError(f"{option}_size: must be -1 or at least 1, not {size}")
        for option, size in (("pp", pp), ("ring", ring), ("ulysses", ulysses), ("tp", tp)):
            check_at_least(option, size, 1)
        others = pp * ring * ulysses * tp
        if world_size % others:
            raise ValueError(
                f"{world_size} processes cannot be divided by the model-parallel sizes (pp={pp} "
                f"x ring {ring} x Ulysses {ulysses} x tensor {tp} = {others})"
            )
        dp_size = world_size // others
        if ep > 1 and mode == "none":
            raise ValueError(f'ep: {ep} needs mode="fsdp2" or "ddp", not none')
        if mode == "none" and dp_size > 1:
            raise ValueError(
                f"mode: none runs one data-parallel rank, but {dp_size} were started: "
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
            raise ValueError(f'shard_size: {shard_size} needs mode="fsdp2", not ddp')
        if shard * replicate != dp_size:
            raise ValueError(
                f"{dp_size} data-parallel ranks ({world_size} processes / {others}) are not "
                f"replicate_size {replicate} x shard_size {shard}: "
                "change the sizes (-1 infers a size) or the number of processes"
            )
        sharding = context_sharding if mode == "fsdp2" else "none"
        dims = cls(pp, replicate, shard, ring, ulysses, tp, sharding, ep, ep_outside)
        if mode == "ddp" and ep > 1 and dims.num_expert_shards > 1:
            wanted = dims.num_expert_shards * ep
            raise ValueError(
                f"ep: with mode ddp, each expert is on one rank, so it must be {wanted}, not {ep}, or the mode fsdp2"
            )
        return dims


@dataclass(frozen=True)
class Axis:
    """This process's place in a group of processes along one or more axes.

    group: the processes. rank, size: this process's index among them, and their number.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def ranks(self) -> RankGroup:
        """The group by its name, as operators take it."""
        return RankGroup(self.rank, self.size, self.group.group_name)


class Link(NamedTuple):
    """The groups of the ranks of a pipeline over which a rank receives and sends in one direction."""

    receives: dist.ProcessGroup
    sends: dist.ProcessGroup


class Mesh:
    """The processes of the job arranged along `AXES`, and views of them by use.

    Requires an initialised default process group of `dims.world_size` processes. Construction is collective.

    Attributes:
        data: the ranks that read different data; ranks with the same index read the same batches.
        context: the ranks that share the sequences of a batch, each with its own part of the tokens.
        ring, ulysses: the two axes of `context`; consecutive ranks of `context` are of the same ring rank.
        tp: the ranks that share each matrix.
        rows: the ranks that have different tokens of the sequences of a batch between the matrices that they share, and
            in experts: context and tp together.
        loss: the ranks whose losses, counts and gradients are summed: data and context together. All ranks of `tp` have
            the same losses and counts.
        pp: the ranks that have the stages of a pipeline. The first has the last stage, so that rank 0 has the losses.
        stage: the number of this rank's stage.
        losses: the ranks of `loss` of all stages; the last stage alone has losses and counts.
        ends: the ranks of the first and the last stage, which hold the same embedding if it is also the head; None: on
            ranks of other stages, or without a pipeline.
        links: the links in the direction of the next stage and of the previous one; the stages form a circle. Each has
            the groups over which this rank receives and sends. NCCL computes the transfers of a group one after the
            other, so those that a rank receives and those that it sends need groups of their own.
        readers: the global rank that is first among those that read the same batches, by index in `data`.
        fsdp: the device mesh that parameters are sharded over: (shard,), or (replicate, shard) if some ranks hold
            copies. Its ranks are those of `loss`.
        ep: the ranks among which the experts are divided; each holds an equal range of them. None: every rank holds
            all experts.
        expert_fsdp: like `fsdp`, for the experts that this rank holds, over `tp`, too.
        holders: the ranks that together hold a matrix that `tp` divides and `fsdp` shards; its neighbours are of
            different ranks of `tp`.
    """

    def __init__(self, dims: ParallelDims, device_type: str) -> None:
        check_device_type(device_type)
        if not dist.is_initialized():
            raise RuntimeError("a mesh needs a process group: call xorl.core.runtime.init first")
        if dist.get_world_size() != dims.world_size:
            raise ValueError(f"{dims} needs {dims.world_size} processes, but {dist.get_world_size()} were started")
        self.dims = dims
        self.device_type = device_type
        sizes = tuple(getattr(dims, axis) for axis in AXES)
        self.device_mesh: DeviceMesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
        self.data = self._view("data", *DATA_AXES)
        self.context = self._view("context", *CONTEXT_AXES)
        self.ring, self.ulysses, self.tp = (_axis_of(self.device_mesh[axis]) for axis in (*CONTEXT_AXES, "tp"))
        self.rows = self._view("rows", *CONTEXT_AXES, "tp")
        self.loss = self._view("loss", *DATA_AXES, *CONTEXT_AXES)
        self.pp = _axis_of(self.device_mesh["pp"])
        self.stage = dims.pp - 1 - self.pp.rank
        self.losses = self.loss if dims.pp == 1 else self._view("losses", "pp", *DATA_AXES, *CONTEXT_AXES)
        numbers = torch.arange(dims.world_size).view(sizes)
        self.ends = self._ends(numbers) if dims.pp > 1 else None
        self.links = self._links(numbers) if dims.pp > 1 else None
        self.readers: tuple[int, ...] = tuple(_groups(numbers, DATA_AXES)[0].tolist())
        self.fsdp = self._sharding_mesh()
        self.ep: Axis | None = None
        self.expert_fsdp = self.fsdp
        if dims.ep > 1 or dims.tp > 1:
            self.expert_fsdp, ep = self._expert_meshes()
            self.ep = ep if dims.ep > 1 else None
        self.holders = self._holders()
        self._neighbours: dict[int, dist.ProcessGroup] = {}

    @property
    def is_reader(self) -> bool:
        """Whether this rank is the first of those that read the same batches."""
        return self.rows.rank == 0 and self.pp.rank == 0

    def axis(self, name: str) -> Axis:
        """This process's place along an axis that shares of parameters name (`xorl.core.nn.share`).

        Raises ValueError for an axis that no parameter is divided along.
        """
        found = {"ep": self.ep, "tp": self.tp, "ends": self.ends}.get(name)
        if found is None or found.size == 1:
            raise ValueError(f"name: no parameter of this mesh is divided along {name!r}; its size must be above 1")
        return found

    def neighbours(self, count: int) -> dist.ProcessGroup:
        """The `count` consecutive ranks of `tp` that this one belongs to. Collective when first called with a count."""
        if count not in self._neighbours:
            mesh = DeviceMesh(self.device_type, self.device_mesh.mesh.view(-1, count), mesh_dim_names=("others", "own"))
            self._neighbours[count] = mesh.get_group("own")
        return self._neighbours[count]

    def describe(self) -> str:
        """The axes in use and which ranks share what; a few lines for the start of a run."""
        lines = [f"mesh of {self.dims.world_size} ranks: {self.dims.used or 'one process'}"]
        numbers = torch.arange(self.dims.world_size).view([getattr(self.dims, axis) for axis in AXES])
        for use, axes in (
            ("have the stages of a pipeline, the last one first", ("pp",)),
            ("share the rows of the same batches", CONTEXT_AXES),
            ("share each matrix", ("tp",)),
            ("shard the parameters", self.dims.shard_axes),
            ("hold copies of the same shard", self.dims.replicate_axes),
        ):
            groups = _groups(numbers, axes)
            if groups.shape[1] > 1:
                lines.append(f"  {use}: {_shown(groups)}")
        if self.dims.ep > 1:
            experts = self._expert_ranks().flatten(0, 1)  # [replicas, shards of the experts, ep]
            lines.append(f"  share the experts: {_shown(experts.flatten(0, 1))}")
            if self.dims.num_expert_shards > 1:
                lines.append(f"  shard the same experts: {_shown(experts.transpose(1, 2).flatten(0, 1))}")
        return "\n".join(lines)

    def _ends(self, numbers: torch.Tensor) -> Axis | None:
        groups = _groups(numbers, ("pp",))[:, [0, -1]]
        return _own_axis(groups)

    def _links(self, numbers: torch.Tensor) -> tuple[Link, Link]:
        size, lines = self.dims.pp, _groups(numbers, ("pp",))
        # By the edge from each stage to the next; neighbouring edges have different groups.
        colors = [edge % 2 for edge in range(size)]
        if size % 2:
            colors[-1] = 2
        links: list[Link] = []
        for is_down in (True, False):
            groups = [_own_axis(lines) for _ in range(max(colors) + 1)]
            of_edge = [group.group for color in colors if (group := groups[color]) is not None]
            before, after = of_edge[self.stage - 1], of_edge[self.stage]
            links.append(Link(before, after) if is_down else Link(after, before))
        return links[0], links[1]

    def _view(self, name: str, *axes: str) -> Axis:
        from xorl.core.torch_private import flattened  # noqa: PLC0415 - imports FSDP2, which takes a second

        return _axis_of(flattened(self.device_mesh[axes], name))

    def _ranks(self, shard: Sequence[str]) -> torch.Tensor:
        """[others, replicas, shards]: the ranks by what they hold of parameters sharded over the axes `shard`."""
        replicate = tuple(axis for axis in self.dims.replicate_axes if axis not in shard)
        others = tuple(axis for axis in AXES if axis not in (*shard, *replicate))
        order = [AXES.index(axis) for axis in (*others, *replicate, *shard)]
        sizes = [self.dims.size_of(axes) for axes in (others, replicate, shard)]
        return self.device_mesh.mesh.permute(order).reshape(sizes)

    def _expert_ranks(self) -> torch.Tensor:
        """[others, replicas, shards of the experts, ep]: the ranks by what they hold of the experts."""
        dims = self.dims
        ranks = self._ranks(dims.expert_axes)
        if dims.ep_outside:
            return ranks.unflatten(2, (dims.ep, dims.num_expert_shards)).transpose(2, 3)
        return ranks.unflatten(2, (dims.num_expert_shards, dims.ep))

    def _sharding_mesh(self) -> DeviceMesh:
        numbers = self._ranks(self.dims.shard_axes)
        mesh = DeviceMesh(self.device_type, numbers, mesh_dim_names=("others", "replicate", "shard"))
        return self._replicated(mesh, numbers[mesh.get_local_rank("others")], "shard")

    def _expert_meshes(self) -> tuple[DeviceMesh, Axis]:
        numbers = self._expert_ranks()
        names = ("others", "replicate", "expert_shard", "ep")
        mesh = DeviceMesh(self.device_type, numbers, mesh_dim_names=names)
        own = numbers[mesh.get_local_rank("others"), :, :, mesh.get_local_rank("ep")]
        return self._replicated(mesh, own, "expert_shard"), _axis_of(mesh["ep"])

    def _holders(self) -> dist.ProcessGroup:
        if self.dims.tp == 1:
            return self.fsdp.get_group(self.fsdp.ndim - 1)
        if self.dims.ep == 1:
            return self.expert_fsdp.get_group(self.expert_fsdp.ndim - 1)
        names = ("others", "replicate", "holder")
        mesh = DeviceMesh(self.device_type, self._ranks((*self.dims.shard_axes, "tp")), mesh_dim_names=names)
        return mesh.get_group("holder")

    def _replicated(self, mesh: DeviceMesh, numbers: torch.Tensor, shard: str) -> DeviceMesh:
        """(shard,), or (replicate, shard) if there are replicas, with the ranks `numbers` [replicas, shards]."""
        if len(numbers) == 1:
            return mesh[shard]
        # Not mesh["replicate", shard], which torch refuses for an axis of size 1.
        groups = [mesh.get_group("replicate"), mesh.get_group(shard)]
        return DeviceMesh.from_group(groups, self.device_type, numbers, mesh_dim_names=("replicate", shard))


def _axis_of(mesh: DeviceMesh) -> Axis:
    return Axis(mesh.get_group(), mesh.get_local_rank(), mesh.size())


def _own_axis(groups: torch.Tensor) -> Axis | None:
    """This process's place in a new process group of each of the rows of ranks; None if it is in none. Collective."""
    own = None
    for ranks in groups.tolist():
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            assert isinstance(group, dist.ProcessGroup), "this rank is in it"
            own = Axis(group, ranks.index(dist.get_rank()), len(ranks))
    return own


def _groups(numbers: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """The ranks of each group along `axes`: [number of groups, size of a group]."""
    dims = [AXES.index(axis) for axis in axes]
    others = [dim for dim in range(len(AXES)) if dim not in dims]
    size = math.prod(numbers.shape[dim] for dim in dims)
    return numbers.permute([*others, *dims]).reshape(-1, size)


def _shown(groups: torch.Tensor) -> str:
    """All groups, or the first ones of many: 0-3, 4-7; ranks at equal distances as first, second ... last."""

    def shown(ranks: list[int]) -> str:
        step = ranks[1] - ranks[0]
        if ranks != list(range(ranks[0], ranks[-1] + 1, step)):
            return " ".join(map(str, ranks[:MAX_SHOWN])) + (" ..." if len(ranks) > MAX_SHOWN else "")
        if step == 1:
            return f"{ranks[0]}-{ranks[-1]}"
        return f"{ranks[0]} {ranks[1]}" if len(ranks) == 2 else f"{ranks[0]} {ranks[1]} .. {ranks[-1]}"

    listed = [shown(ranks) for ranks in groups[:MAX_SHOWN].tolist()]
    return ", ".join(listed) + (f", ... ({len(groups)} groups)" if len(groups) > MAX_SHOWN else "")
