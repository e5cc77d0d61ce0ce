"""Times the attention of one rank that shares a row with others, beside that of a rank alone.

    python tools/bench_context.py --num-tokens 32768 131072
    torchrun --nproc-per-node 2 tools/bench_context.py --num-tokens 32768 131072
    python tools/bench_context.py --tiny                                        # to test the tool

One document fills the row. Without torchrun the other ranks are absent: exchanges are prepared and take no time, so the
figures are what one rank computes. With torchrun the layouts of its number of ranks are timed, exchanges included.
Prints a table in Markdown: milliseconds of a forward and a backward pass (medians), and the share of a rank alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench_experts import median_ms
from xorl.core.nn.ulysses import ulysses_attention
from xorl.kernels.attention import AttentionFn, AttentionRequest, AttentionSpec, resolve_attention
from xorl.kernels.layout import RankGroup, SequenceLayout, ShardedLayout

# The shape of an 8B model's attention.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
SPEC = AttentionSpec(HEAD_DIM**-0.5)
LAYOUTS = (("ulysses", 2), ("ring", 2), ("ring", 4))


def attention_of(kind: str, attention: AttentionFn, whole: SequenceLayout, size: int) -> Callable[..., Tensor]:
    """Attention (q, k, v) of this rank's tokens in the default process group, which has `size` ranks."""
    assert dist.group.WORLD is not None
    shared, alone = RankGroup(dist.get_rank(), size, dist.group.WORLD.group_name), RankGroup(0, 1, "")
    ring, ulysses = (shared, alone) if kind == "ring" else (alone, shared)
    layout = ShardedLayout(whole, ring, ulysses, shared.name)
    if kind == "ring":
        return partial(attention.in_ring, layout=layout, spec=SPEC)
    return partial(_ulysses, attention=partial(attention, layout=whole, spec=SPEC), group=ulysses)


def _ulysses(q: Tensor, k: Tensor, v: Tensor, *, attention: Callable[..., Tensor], group: RankGroup) -> Tensor:
    return ulysses_attention(attention, q, k, v, group)


def measure(call: Callable[..., Tensor], num_tokens: int, device: torch.device, rounds: int) -> float:
    """Milliseconds of a forward and a backward pass over random tokens."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    leaves = [torch.randn(num_tokens, heads, HEAD_DIM, device=device, dtype=dtype).requires_grad_() for heads in sizes]
    grad = torch.randn_like(leaves[0])
    return median_ms(lambda: torch.autograd.grad(call(*leaves), leaves, grad), device, rounds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-tokens", nargs="+", type=int, default=[32768])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() and not options.tiny else "cpu")
    num_started = int(os.environ.get("WORLD_SIZE", "1"))
    if num_started > 1:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention = resolve_attention(options.backend, AttentionRequest(device.type, dtype, HEAD_DIM, None, False))
    lines = ["| tokens | layout | ms | share |", "|---|---|---|---|"]
    for num_tokens in [512] if options.tiny else options.num_tokens:
        whole = SequenceLayout.from_lengths([num_tokens], device)
        alone = measure(partial(attention, layout=whole, spec=SPEC), num_tokens, device, options.rounds)
        lines.append(f"| {num_tokens} | one rank | {alone:.2f} | |")
        for kind, size in LAYOUTS:
            if num_started not in (1, size):
                continue
            if num_started == 1:
                dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
            call = attention_of(kind, attention, whole, size)
            took = measure(call, num_tokens // size, device, options.rounds)
            lines.append(f"| {num_tokens} | {kind} {size} | {took:.2f} | {took / alone:.3f} |")
            if num_started == 1:
                dist.destroy_process_group()
    if num_started == 1 or dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
    if num_started > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
