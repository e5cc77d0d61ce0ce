"""Gathering by copy engines beside NCCL's all-gather, on two GPUs of one host; as a script, what each of them runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from xorl.core.parallel import gather

pytestmark = pytest.mark.gpu

HALF_BYTES = 1 << 20


def test_every_rank_gets_what_nccl_brings() -> None:
    # Catches a window that is written while a peer still reads it, pieces in the wrong place, and a last one that is
    # short.
    if torch.cuda.device_count() < 2:
        pytest.skip("this host has one GPU")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert result.returncode == 0, result.stderr[-6000:]


def compare_with_nccl() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    group = dist.group.WORLD
    assert group is not None
    gather.HALF_BYTES = HALF_BYTES
    all_gather = gather.copy_engine_all_gather(group)
    assert all_gather is not None
    device = torch.device("cuda", rank)
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
            # One rank is late, so that the other would overwrite what it has not read yet.
            torch.cuda._sleep(rank * (number % 4) * 1_000_000)
            assert all_gather(output, own, group) is None
        found.append((output, wanted, shard))
    torch.cuda.synchronize()
    for output, wanted, _ in found:
        assert torch.equal(output, wanted)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    compare_with_nccl()
