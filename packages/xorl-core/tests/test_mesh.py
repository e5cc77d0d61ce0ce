"""Degrees of parallelism from options."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from xorl.core.mesh import AXES, ContextSharding, Mesh, ParallelDims


@pytest.mark.parametrize(
    ("mode", "world", "shard", "replicate", "expected"),
    [
        ("none", 1, -1, -1, (1, 1)),
        ("ddp", 4, -1, -1, (4, 1)),
        ("fsdp2", 4, -1, -1, (1, 4)),
        ("fsdp2", 4, 2, -1, (2, 2)),
        ("fsdp2", 4, -1, 2, (2, 2)),
        ("fsdp2", 8, 4, 2, (2, 4)),
        ("fsdp2", 1, -1, -1, (1, 1)),
    ],
)
def test_sizes_resolve(mode: str, world: int, shard: int, replicate: int, expected: tuple[int, int]) -> None:
    # Catches a -1 that takes the whole world where another axis already has a share of it.
    dims = ParallelDims.resolve(mode, world, shard_size=shard, replicate_size=replicate)
    assert (dims.dp_replicate, dims.dp_shard) == expected
    assert dims.world_size == world


@pytest.mark.parametrize(
    ("mode", "world", "sizes", "named"),
    [
        ("none", 2, {}, "mode: none"),
        ("fsdp2", 4, {"shard_size": 3}, "shard_size 3"),
        ("fsdp2", 4, {"replicate_size": 3}, "replicate_size 3"),
        ("ddp", 4, {"shard_size": 2}, "shard_size: 2"),
        ("ddp", 4, {"ep": 2}, "ep: with mode ddp, each expert is on one rank, so it must be 4, not 2"),
        ("none", 1, {"ep": 2}, "ep: 2 needs"),
        ("fsdp2", 4, {"tp": 3}, "tensor 3"),
        ("fsdp2", 4, {"shard_size": 0}, "shard_size"),
    ],
)
def test_sizes_that_do_not_fit_name_the_option(mode: str, world: int, sizes: dict[str, int], named: str) -> None:
    # Catches a job that starts with idle or doubled ranks.
    with pytest.raises(ValueError, match=named):
        ParallelDims.resolve(mode, world, **sizes)


@contextmanager
def mesh_of(dims: ParallelDims, rank: int) -> Iterator[Mesh]:
    """The mesh as one rank sees it, without the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=dims.world_size)
    try:
        yield Mesh(dims, "cpu")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("sharding", "shard", "replicate"),
    [
        ("all", ("dp_shard", "ring", "ulysses"), ("dp_replicate",)),
        ("ulysses_only", ("dp_shard", "ulysses"), ("dp_replicate", "ring")),
        ("ring_only", ("dp_shard", "ring"), ("dp_replicate", "ulysses")),
        ("none", ("dp_shard",), ("dp_replicate", "ring", "ulysses")),
    ],
)
def test_views_of_4096_ranks(sharding: ContextSharding, shard: tuple[str, ...], replicate: tuple[str, ...]) -> None:
    # Catches a view over the wrong axes, or with its axes in another order than the ranks'.
    dims = ParallelDims(pp=2, dp_replicate=4, dp_shard=32, ring=2, ulysses=4, tp=2, context_sharding=sharding)
    sizes = [getattr(dims, axis) for axis in AXES]
    for rank in (1234, 4095):
        at = dict(zip(AXES, torch.unravel_index(torch.tensor(rank), sizes), strict=True))

        def index(*axes: str, at: dict[str, torch.Tensor] = at) -> int:
            found = 0
            for axis in axes:
                found = found * getattr(dims, axis) + int(at[axis])
            return found

        with mesh_of(dims, rank) as mesh:
            assert (mesh.data.rank, mesh.data.size) == (index("dp_replicate", "dp_shard"), 128)
            assert (mesh.context.rank, mesh.context.size) == (index("ring", "ulysses"), 8)
            first = tuple(int(at[axis]) if axis.startswith("dp") else 0 for axis in AXES)
            assert len(mesh.readers) == 128
            assert mesh.readers[mesh.data.rank] == torch.arange(4096).view(sizes)[first]
            assert (mesh.loss.rank, mesh.loss.size) == (index("dp_replicate", "dp_shard", "ring", "ulysses"), 1024)
            assert mesh.fsdp.get_local_rank("shard") == index(*shard)
            assert mesh.fsdp.size(-1) == dims.num_shards == dims.size_of(shard)
            assert mesh.fsdp.get_local_rank("replicate") == index(*replicate)
            assert sorted(mesh.fsdp.mesh.flatten().tolist()) == sorted(dist.get_process_group_ranks(mesh.loss.group))
            assert (mesh.ring.rank, mesh.ulysses.rank) == (index("ring"), index("ulysses"))


def test_a_mesh_describes_itself() -> None:
    # Catches groups that are not those of the mesh.
    dims = ParallelDims(dp_replicate=2, dp_shard=4, ulysses=2, context_sharding="none")
    with mesh_of(dims, 3) as mesh:
        assert mesh.describe().splitlines() == [
            "mesh of 16 ranks: dp_replicate 2 x dp_shard 4 x ulysses 2",
            "  share the rows of the same batches: 0-1, 2-3, 4-5, 6-7, ... (8 groups)",
            "  shard the parameters: 0 2 .. 6, 1 3 .. 7, 8 10 .. 14, 9 11 .. 15",
            "  hold copies of the same shard: 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15",
        ]
    with mesh_of(ParallelDims(dp_replicate=4, ep=4), 3) as mesh:
        assert mesh.describe().splitlines() == [
            "mesh of 4 ranks: dp_replicate 4 x ep 4",
            "  hold copies of the same shard: 0-3",
            "  share the experts: 0-3",
        ]
