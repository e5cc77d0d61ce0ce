"""The memory of replicas, and the end of CUDA graphs, on one rank."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from xorl.core import runtime
from xorl.core.graphs import new_graph
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.parallel.ddp import _sum_gradients, replicate


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
    buffer = torch.randn(20).bfloat16()
    expected = buffer.clone()
    bucket = SimpleNamespace(buffer=lambda: buffer, is_last=lambda: False)
    summed = _sum_gradients(weakref.ref(replica), bucket).wait()
    runtime.shutdown()
    assert summed.data_ptr() == buffer.data_ptr()
    assert torch.equal(summed, expected)


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
