"""Collectives on copy engines beside NCCL's, on two GPUs of one host; as a script, what each of them runs."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from xorl.core.parallel import collectives, copy_engine
from xorl.core.torch_private import gather_in_place

pytestmark = pytest.mark.gpu

HALF_BYTES = 1 << 20


def test_every_rank_gets_what_nccl_brings(two_gpus) -> None:
    # Catches a window that is written while it is still read, pieces in the wrong place, a last one that is short, and
    # sums that are rounded to what travels.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert result.returncode == 0, result.stderr[-6000:]


def compare_with_nccl() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    group = dist.group.WORLD
    assert group is not None
    copy_engine.HALF_BYTES = HALF_BYTES
    assert copy_engine.can_use_copy_engines(group)
    device = torch.device("cuda", rank)
    compare_gathers(group, device)
    for dtype in (torch.bfloat16, torch.float32):
        compare_sums(group, device, dtype)
    compare_steps(group, device)
    compare_times(group)
    dist.barrier()
    dist.destroy_process_group()


def compare_gathers(group: dist.ProcessGroup, device: torch.device) -> None:
    rank, all_gather = group.rank(), copy_engine.CopyEngineAllGather(group, device)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    generator = torch.Generator(device).manual_seed(rank)
    found = []
    for number, (size, dtype) in enumerate(
        [(1, torch.uint8), (HALF_BYTES, torch.uint8), (HALF_BYTES + 3, torch.uint8), (3_000_001, torch.bfloat16)] * 20
    ):
        shard = torch.randint(0, 100, (size,), device=device, generator=generator).to(dtype)
        wanted = torch.empty(2 * size, dtype=dtype, device=device)
        dist.all_gather_into_tensor(wanted, shard)
        stream = streams[number % 3 // 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            output = all_gather.allocate((2 * size,), dtype=dtype, device=device)
            own = output[rank * size : (rank + 1) * size]
            own.copy_(shard)
            be_late(rank, number)
            assert all_gather(output, own, group) is None
        found.append((output, wanted, shard))
    torch.cuda.synchronize()
    for output, wanted, _ in found:
        assert torch.equal(output, wanted)


def compare_sums(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
    rank, reduce_scatter = group.rank(), copy_engine.CopyEngineReduceScatter(group, device, dtype)
    stream = torch.cuda.Stream()
    generator = torch.Generator(device).manual_seed(rank)
    found = []
    for number, size in enumerate([1, HALF_BYTES // dtype.itemsize, 777_777, 3_000_001] * 20):
        whole = reduce_scatter.allocate((2 * size,), dtype=torch.float32, device=device)
        assert whole.dtype == dtype
        whole.copy_(torch.randn(2 * size, device=device, generator=generator))
        wanted = torch.empty(size, device=device)
        dist.reduce_scatter_tensor(wanted, whole.float())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            output = reduce_scatter.allocate((size,), dtype=torch.float32, device=device)
            assert output.dtype == torch.float32
            be_late(rank, number)
            assert reduce_scatter(output, whole, group, dist.ReduceOp.SUM) is None
        found.append((output, wanted, whole))
        del whole
    torch.cuda.synchronize()
    for output, wanted, _ in found:
        assert torch.equal(output, wanted)


def compare_steps(group: dist.ProcessGroup, device: torch.device) -> None:
    """FSDP2 computes the same bits if its parameters are gathered in place, in memory that earlier units had."""
    expected, found = (losses_of(group, device, in_place=one) for one in (False, True))
    assert torch.equal(found, expected)


def losses_of(group: dist.ProcessGroup, device: torch.device, *, in_place: bool) -> Tensor:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)) for _ in range(6)]
    model = nn.Sequential(*layers).to(device)
    mesh = init_device_mesh("cuda", (group.size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for layer, following in pairwise(model):
        layer.set_modules_to_forward_prefetch([following])
    if in_place:
        all_gather = copy_engine.CopyEngineAllGather(group, device)
        for layer in model:
            assert isinstance(layer, FSDPModule)
            layer.set_custom_all_gather(all_gather)
            gather_in_place(layer, all_gather.gather_into)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(8):
        x = torch.randn(1024, 2048, device=device, generator=torch.Generator(device).manual_seed(step + group.rank()))
        be_late(group.rank(), step)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def compare_times(group: dist.ProcessGroup) -> None:
    """The choice is measured once, the same on all ranks, and draws no random number of the run."""
    before = torch.cuda.get_rng_state()
    first = collectives.transport(group, "auto")
    collectives.measure = None
    chosen = [None] * group.size()
    dist.all_gather_object(chosen, collectives.transport(group, "auto"))
    assert set(chosen) == {first}
    assert collectives.transport(group, "nccl") == "nccl"
    assert collectives.transport(group, "copy_engine") == "copy_engine"
    assert torch.equal(before, torch.cuda.get_rng_state())


def be_late(rank: int, number: int) -> None:
    """One rank is, so that the other would write where it has not read yet."""
    torch.cuda._sleep(rank * (number % 4) * 1_000_000)


if __name__ == "__main__":
    compare_with_nccl()
