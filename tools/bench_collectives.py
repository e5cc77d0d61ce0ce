"""Times the all-gather of a layer's parameters beside matrix products: by NCCL, by NCCL without thread blocks, by xorl.

    torchrun --nproc-per-node 2 tools/bench_collectives.py --mib 368

NCCL takes no thread blocks ("zero CTA") if the policy of its communicator says so and the output is symmetric memory;
copy engines then move the data, as in `xorl.core.parallel.copy_engine`. "Alone" is the time of a gather, "products"
that of products which need the whole GPU, and "together" that of both on two streams: what is above the longer of the
two is lost. Prints a table in Markdown; all times are medians in milliseconds. Needs GPUs that can access each other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from xorl.core.parallel.copy_engine import CopyEngineAllGather, can_use_copy_engines

ROUNDS, WARMUP = 20, 5
Gather = Callable[[], object]


def nccl_gather(shard: torch.Tensor, device: torch.device) -> Gather:
    """NCCL's all-gather as it comes."""
    group = dist.new_group(device_id=device)
    output = torch.empty(shard.numel() * dist.get_world_size(), dtype=shard.dtype, device=device)
    return lambda: dist.all_gather_into_tensor(output, shard, group=group)


def zero_cta_gather(shard: torch.Tensor, device: torch.device) -> Gather:
    """NCCL's all-gather without thread blocks."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    group = dist.new_group(pg_options=options, device_id=device)
    backend = group._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        output = torch.empty(shard.numel() * dist.get_world_size(), dtype=shard.dtype, device=device)
    dist.all_gather_into_tensor(output, shard, group=group)  # the communicator exists from here on
    backend.register_mem_pool(pool, symm=True)
    gather = lambda: dist.all_gather_into_tensor(output, shard, group=group)  # noqa: E731
    gather.pool = pool  # pyright: ignore[reportFunctionMemberAccess] lives as long as its memory
    return gather


def xorl_gather(shard: torch.Tensor, device: torch.device) -> Gather:
    """The all-gather of xorl, through symmetric memory of CUDA."""
    group = dist.group.WORLD
    assert group is not None
    if not can_use_copy_engines(group):
        raise SystemExit("the GPUs cannot access each other")
    symmetric_memory.set_backend("CUDA")
    engine, rank = CopyEngineAllGather(group, device), dist.get_rank()
    output = torch.empty(shard.numel() * dist.get_world_size(), dtype=shard.dtype, device=device)
    own = output.view(dist.get_world_size(), -1)[rank]
    own.copy_(shard)
    return lambda: engine(output, own, group)


def milliseconds(*works: Callable[[], object]) -> float:
    """The median time of `works`, which run at the same time, each on a stream of its own; the slowest rank's."""
    times: list[float] = []
    streams = [torch.cuda.Stream() for _ in works]
    for _ in range(WARMUP + ROUNDS):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for stream, work in zip(streams, works, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    found = torch.tensor(statistics.median(times[WARMUP:]), device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=368, help="of the gathered parameters; a layer of Qwen3-8B has 368")
    parser.add_argument("--tokens", type=int, default=8192, help="rows of the products")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    num_ranks = dist.get_world_size()
    shard = torch.randn(options.mib * 2**19 // num_ranks, device=device).to(torch.bfloat16)
    rows, weight = (torch.randn(size, 4096, device=device, dtype=torch.bfloat16) for size in (options.tokens, 12288))

    def products() -> None:
        for _ in range(8):
            rows @ weight.T

    alone = milliseconds(products)
    lines = [
        f"| all-gather of {options.mib} MiB over {num_ranks} ranks | alone | GB/s | products | together | lost |",
        "|---|---|---|---|---|---|",
    ]
    for name, make in (("NCCL", nccl_gather), ("xorl", xorl_gather), ("NCCL, zero CTA", zero_cta_gather)):
        gather = make(shard, device)
        gathering, together = milliseconds(gather), milliseconds(products, gather)
        rate = options.mib * 2**20 * (num_ranks - 1) / num_ranks / gathering / 1e6
        lost = together - max(alone, gathering)
        lines.append(f"| {name} | {gathering:.2f} | {rate:.0f} | {alone:.2f} | {together:.2f} | {lost:.2f} |")
        if dist.get_rank() == 0:
            print(lines[-1], file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
