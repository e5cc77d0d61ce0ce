"""Times the all-gather of a unit's parameters, alone and beside matrix products: NCCL's kernels, NCCL without thread
blocks (its zero-CTA policy), and FSDP2's copy engines.

    torchrun --nproc-per-node 2 tools/bench_gather.py

A unit is a layer of an 8B model in bf16. Beside products, what counts is the time that a gather adds to them. Prints a
table in Markdown.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench_experts import median_ms
from xorl.core.parallel.copy_engine import CopyEngineAllGather, can_use_copy_engines

# A layer of an 8B model, and the products of its feed-forward block for 8,192 tokens.
UNIT_VALUES = 192_946_432
TOKENS, WIDTH, INNER = 8192, 4096, 12288

Gather = Callable[[], object]


@contextmanager
def gathers(group: dist.ProcessGroup, device: torch.device, values: int) -> Iterator[dict[str, Gather]]:
    """The gathers by name; the results are compared with NCCL's."""
    rank, size = group.rank(), group.size()
    nccl: Any = dist.ProcessGroupNCCL
    shard = torch.randn(values // size, device=device).bfloat16()
    plain = torch.empty(values // size * size, dtype=torch.bfloat16, device=device)
    options = nccl.Options()
    options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    zero_group: Any = dist.new_group(backend="nccl", pg_options=options)
    backend = zero_group._get_backend(device)
    dist.barrier(group=zero_group, device_ids=[device.index])  # the pool needs a communicator
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        buffers = [torch.empty_like(plain), torch.empty_like(shard)]
    buffers[1].copy_(shard)
    backend.register_mem_pool(pool, symm=True)
    engines = CopyEngineAllGather(group, device)
    output = engines.allocate(plain.shape, dtype=plain.dtype, device=device)
    own = output.view(size, -1)[rank]
    own.copy_(shard)
    found: dict[str, tuple[Tensor, Gather]] = {
        "NCCL": (plain, lambda: dist.all_gather_into_tensor(plain, shard)),
        "NCCL, zero CTAs": (buffers[0], lambda: dist.all_gather_into_tensor(*buffers, group=zero_group)),
        "copy engines": (output, lambda: engines(output, own, group)),
    }
    for name, (result, gather) in found.items():
        gather()
        torch.cuda.synchronize()
        assert torch.equal(result, plain), name
    yield {name: gather for name, (_, gather) in found.items()}
    backend.deregister_mem_pool(pool)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=UNIT_VALUES, help="parameters of a unit")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--products", type=int, default=8, help="pairs of products beside a gather")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # NCCL before 2.29.7 cannot use copy engines on the default stream.
    torch.cuda.set_stream(torch.cuda.Stream())
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    assert can_use_copy_engines(group), "the GPUs of this host cannot access each other"
    x = torch.randn(TOKENS, WIDTH, device=device).bfloat16()
    up = torch.randn(WIDTH, INNER, device=device).bfloat16()
    side = torch.cuda.Stream()

    def products() -> None:
        for _ in range(options.products):
            _ = (x @ up) @ up.t()

    def both(gather: Gather) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            gather()
        products()
        torch.cuda.current_stream().wait_stream(side)

    with gathers(group, device, options.values) as named:
        alone = median_ms(products, device, options.rounds)
        rows = [
            (name, median_ms(gather, device, options.rounds), median_ms(partial(both, gather), device, options.rounds))
            for name, gather in named.items()
        ]
    if group.rank() == 0:
        gib = options.values * 2 / 2**30
        print(f"{torch.cuda.get_device_name()}, {group.size()} ranks, {gib:.2f} GiB a unit")
        print(f"products alone: {alone:.2f} ms\n\n| gather | alone, ms | added to products, ms |\n|---|---|---|")
        for name, time, together in rows:
            print(f"| {name} | {time:.2f} | {together - alone:.2f} |")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
