"""Times a layer of experts that ranks share, forward and backward, with each way to send tokens to their experts.

    uv run torchrun --nproc-per-node 2 tools/bench_exchange.py                            # a tiny layer, on CPUs
    torchrun --nproc-per-node 4 tools/bench_exchange.py --shape qwen3-30b --tokens 4096 16384

"alltoall": tokens go to the ranks that hold their experts, and the host waits for their number. "allgather": all ranks
get the tokens of all, and compute the choices of their own experts. Sizes never change, so the host does not wait, and
a CUDA graph can hold the layer. It reserves room for twice the mean number of choices, and later passes compute what is
more; "first pass alone" leaves them out. With --skew, more choices than the mean fall on the first rank.

Prints a table in Markdown of the slowest rank: milliseconds of the device for a pass that ranks begin together, for one
of several in a row, and of the host to launch one of these.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench_experts import SHAPES
from xorl.core.nn.all_gather import AllGather, GatherPlan
from xorl.core.nn.dispatch import AllToAll, Dispatcher
from xorl.core.nn.gathered_experts import gathered_experts
from xorl.core.runtime import shutdown
from xorl.kernels.experts import EXPERTS, ExpertsFn, ExpertsRequest, products_name
from xorl.kernels.experts.gates import SILU
from xorl.kernels.experts.routing import top_experts
from xorl.kernels.layout import RankGroup

ROUNDS, WARM_UP, IN_A_ROW = 8, 3, 8

Leaves = tuple[Tensor, Tensor, Tensor, Tensor]
# (x, routing weights, gate and up, down) -> the layer's output.
Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def exchanged(
    dispatcher: Dispatcher[Any], ids: Tensor, num_experts: int, kernel: ExpertsFn, *, is_once: bool = False
) -> Layer:
    """A layer whose tokens `dispatcher` sends, planned in each pass. is_once: compute what fits into the first pass."""

    def layer(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        plan = dispatcher.plan(ids, num_experts, None, len(x))
        got = dispatcher.dispatch(x, weights, plan)
        num_rows, num_passes = got.num_rows, got.num_passes
        if is_once:
            num_rows, num_passes = got.ids.numel() // num_passes, 1
        given = got.x, gate_up, down, got.weights, got.ids
        return dispatcher.combine(kernel(*given, num_rows=num_rows, num_passes=num_passes), plan)

    return layer


def together(dispatcher: AllGather, ids: Tensor, num_experts: int, products: str) -> Layer:
    """A layer whose experts and exchange are one operator."""

    def layer(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        plan = dispatcher.plan(ids, num_experts, None, len(x))
        assert isinstance(plan, GatherPlan), "the number of tokens is known"
        return gathered_experts(x, weights, gate_up, down, dispatcher, plan, products=products, gate=SILU)

    return layer


@dataclass(frozen=True)
class Row:
    """Milliseconds of the slowest rank."""

    name: str
    alone: float
    in_a_row: float
    host: float


def slowest(milliseconds: float) -> float:
    """The largest of all ranks' values."""
    values = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, milliseconds)
    return max(values)


def measured(name: str, run: Callable[[], object], device: torch.device) -> Row:
    """Times `run`, which is collective."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def once(count: int) -> tuple[float, float]:
        dist.barrier()
        finish()
        begin = time.perf_counter()
        for _ in range(count):
            run()
        launched = time.perf_counter()
        finish()
        return (launched - begin) * 1000 / count, (time.perf_counter() - begin) * 1000 / count

    found = {count: [once(count) for _ in range(WARM_UP + ROUNDS)][WARM_UP:] for count in (1, IN_A_ROW)}
    alone, row = (statistics.median(total for _, total in found[count]) for count in (1, IN_A_ROW))
    host = statistics.median(launched for launched, _ in found[IN_A_ROW])
    return Row(name, slowest(alone), slowest(row), slowest(host))


def graphed(layer: Layer, leaves: Leaves, grad: Tensor) -> Callable[[], object]:
    """Replays a CUDA graph of a forward and a backward pass, whose gradients are those of the same pass uncaptured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # A capture may not depend on the streams that other leaves were used on.
        own = [leaf.detach().clone().requires_grad_() for leaf in leaves]

        def both() -> tuple[Tensor, ...]:
            return torch.autograd.grad(layer(own[0], own[1], own[2], own[3]), own, grad)

        expected = [both() for _ in range(WARM_UP)][-1]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog queries events from its own thread.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        found = both()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected)), "a replayed pass computes other bits"
    return graph.replay


def rows(options: argparse.Namespace, num_tokens: int, device: torch.device) -> Iterator[Row]:
    """Every way to compute one layer for `num_tokens` tokens of each rank."""
    width, inner, num_experts, num_active = SHAPES[options.shape]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    group = dist.group.WORLD
    assert group is not None
    ranks = RankGroup(group.rank(), group.size(), group.group_name)
    num_local = num_experts // ranks.size
    generator = torch.Generator(device).manual_seed(ranks.rank)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator)

    x, grad = normal(num_tokens, width).to(dtype), normal(num_tokens, width).to(dtype)
    scores = normal(num_tokens, num_experts)
    scores[:, :num_local] += options.skew
    probabilities = scores.softmax(-1)
    ids = top_experts(probabilities, num_active)
    weights = probabilities.gather(-1, ids)
    gate_up = (normal(num_local, 2 * inner, width) * 0.02).to(dtype)
    down = (normal(num_local, width, inner) * 0.02).to(dtype)
    leaves = x, weights / weights.sum(-1, keepdim=True), gate_up, down
    for leaf in leaves:
        leaf.requires_grad_()
    kernel = EXPERTS.resolve(options.experts, ExpertsRequest(device.type, dtype, width, inner))
    layers = {
        "alltoall": exchanged(AllToAll(ranks), ids, num_experts, kernel),
        "allgather": exchanged(AllGather(ranks), ids, num_experts, kernel),
    }
    products = products_name(kernel)
    if products is not None:
        layers["allgather, one operator"] = together(AllGather(ranks), ids, num_experts, products)
    if not options.skew:
        layers["allgather, first pass alone"] = exchanged(AllGather(ranks), ids, num_experts, kernel, is_once=True)
    local = lambda: torch.autograd.grad(kernel(x, gate_up, down, leaves[1], ids % num_local), leaves, grad)  # noqa: E731
    yield measured("this rank's experts, with nothing sent", local, device)
    expected = layers["alltoall"](*leaves).detach().double()
    for name, layer in layers.items():
        out = layer(*leaves).detach().double()
        assert (out - expected).norm() < 1e-2 * expected.norm(), name
        yield measured(name, lambda layer=layer: torch.autograd.grad(layer(*leaves), leaves, grad), device)
    if device.type == "cuda":
        for name, layer in layers.items():
            if name in ("alltoall", "allgather, one operator"):
                continue
            yield measured(f"{name}, CUDA graph", graphed(layer, leaves, grad), device)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64], help="of each rank")
    parser.add_argument("--skew", type=float, default=0.0, help="added to the logits of the first rank's experts")
    parser.add_argument("--experts", default="auto", help=f"auto, {', '.join(EXPERTS.names)}")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(device_id=device if device.type == "cuda" else None)
    for num_tokens in options.tokens:
        found = list(rows(options, num_tokens, device))
        if dist.get_rank() == 0:
            name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
            columns = "alone, ms", f"of {IN_A_ROW} in a row, ms", "host, ms"
            title = f"{options.shape}, {num_tokens:,} tokens a rank, {dist.get_world_size()} x {name}"
            print(f"\n| {title} | {' | '.join(columns)} |\n|---|---|---|---|")
            for row in found:
                print(f"| {row.name} | {row.alone:.2f} | {row.in_a_row:.2f} | {row.host:.2f} |")
    shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
