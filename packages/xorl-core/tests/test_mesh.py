"""Degrees of parallelism from options."""

from __future__ import annotations

import pytest

from xorl.core.mesh import ParallelDims


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
        ("none", 2, {}, "data_parallel_mode none"),
        ("fsdp2", 4, {"shard_size": 3}, "data_parallel_shard_size 3"),
        ("fsdp2", 4, {"replicate_size": 3}, "data_parallel_replicate_size 3"),
        ("ddp", 4, {"shard_size": 2}, "data_parallel_shard_size 2"),
        ("fsdp2", 4, {"tp": 3}, "tensor 3"),
        ("fsdp2", 4, {"shard_size": 0}, "data_parallel_shard_size"),
    ],
)
def test_sizes_that_do_not_fit_name_the_option(mode: str, world: int, sizes: dict[str, int], named: str) -> None:
    # Catches a job that starts with idle or doubled ranks.
    with pytest.raises(ValueError, match=named):
        ParallelDims.resolve(mode, world, **sizes)
