"""Sums of replicas and their memory, and the end of CUDA graphs."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from xorl.core import runtime
from xorl.core.graphs import new_graph
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.parallel.ddp import _sum_gradients, _sum_in_fp32, replicate


@pytest.fixture
def mesh() -> Mesh:
    """This process alone; the test ends its group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Mesh(ParallelDims(), "cpu")


def test_a_replica_is_freed_with_its_last_user(mesh: Mesh) -> None:
    # Catches a reducer that keeps its replica, so that the memory of a model is not free for the next one.
    model = nn.Linear(4, 4)
    replica = replicate(model, mesh)
    replica(torch.randn(2, 4)).sum().backward()
    ended = weakref.ref(model)
    del model, replica
    gc.collect()
    runtime.shutdown()
    assert ended() is None


def test_sums_are_kept_where_the_gradients_were(mesh: Mesh) -> None:
    # Catches a second copy of all gradients until the backward pass ends.
    replica = replicate(nn.Linear(4, 4), mesh)
    buffer = torch.randn(21).bfloat16()
    expected = buffer.clone()
    bucket = SimpleNamespace(buffer=lambda: buffer, is_last=lambda: False)
    summed = _sum_gradients(weakref.ref(replica), bucket).wait()
    runtime.shutdown()
    assert summed.data_ptr() == buffer.data_ptr()
    assert torch.equal(summed, expected)


@pytest.mark.parametrize("size", [1000, 1001])
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_ranks_add_up_in_fp32_and_round_once(num_ranks: int, size: int) -> None:
    # Catches parts of another rank, values that no rank adds up, and sums in half precision.
    store = dist.HashStore()
    given = torch.randn(num_ranks, size, generator=torch.Generator().manual_seed(0)).bfloat16()

    def sum_of(rank: int) -> Tensor:
        group, buffer = dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=60)), given[rank].clone()
        _sum_in_fp32(buffer, group)
        return buffer

    with ThreadPoolExecutor(num_ranks) as pool:
        sums = list(pool.map(sum_of, range(num_ranks)))
    expected = given.double().sum(0).bfloat16()
    for found in sums:
        assert torch.equal(found, expected)


def test_graphs_end_before_their_group(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a job that waits forever at its end: NCCL waits for the graphs that hold its collectives.
    has_group: list[bool] = []

    class Graph:
        def reset(self) -> None:
            has_group.append(dist.is_initialized())

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    held = new_graph()
    runtime.shutdown()
    assert has_group == [True]
    del held
