"""Times a layer of experts that ranks share, forward and backward: the exact exchange of expert parallelism, and the
gathering of all tokens on all ranks, with sums scattered back.

    uv run torchrun --nproc-per-node 2 tools/bench_exchange.py                            # a tiny layer, on CPUs
    torchrun --nproc-per-node 4 tools/bench_exchange.py --shape qwen3-30b --tokens 4096 16384

"exact" is `AllToAll`: tokens go to the ranks that hold their experts, and the host waits for their number. "gathered"
computes, of the tokens of all ranks, the choices of this rank's experts. Sizes never change, so the host does not wait,
and a CUDA graph can hold the layer. It reserves room for twice the mean number of choices, and has no second pass for
more. "reduced in bf16" adds up the ranks' sums by NCCL's reduce-scatter, "summed in fp32" exchanges and then adds them.

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

import torch
import torch.distributed as dist
from torch import Tensor

from bench_experts import SHAPES
from xorl.core.nn.dispatch import AllToAll
from xorl.core.runtime import shutdown
from xorl.kernels.experts import EXPERTS, ExpertsFn, ExpertsRequest
from xorl.kernels.experts.routing import top_experts
from xorl.kernels.layout import RankGroup

ROUNDS, WARM_UP, IN_A_ROW = 8, 3, 8

Leaves = tuple[Tensor, Tensor, Tensor, Tensor]
# (x, routing weights, gate and up, down) -> the layer's output.
Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def gather(x: Tensor) -> Tensor:
    """The rows of all ranks, in their order."""
    out = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def reduce(y: Tensor) -> Tensor:
    """This rank's rows of the sum over ranks, added up by the library in the dtype of y."""
    out = y.new_empty(len(y) // dist.get_world_size(), *y.shape[1:])
    dist.reduce_scatter_tensor(out, y.contiguous())
    return out


def reduce_wide(y: Tensor) -> Tensor:
    """As `reduce`, added up in fp32."""
    received = torch.empty_like(y, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, y.contiguous())
    return received.view(dist.get_world_size(), -1, *y.shape[1:]).sum(0, dtype=torch.float32).to(y.dtype)


class Gathered(torch.autograd.Function):
    """`gather`, whose gradient is a sum over ranks."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, summed: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.summed = summed  # pyright: ignore[reportAttributeAccessIssue]
        return gather(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.summed(grads[0]), None  # pyright: ignore[reportAttributeAccessIssue]


class Summed(torch.autograd.Function):
    """A sum over ranks, whose gradient is `gather`."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, y: Tensor, summed: Callable[[Tensor], Tensor]) -> Tensor:
        return summed(y)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return gather(grads[0]), None


def exact(ids: Tensor, num_experts: int, kernel: ExpertsFn, group: RankGroup) -> Layer:
    """The exchange of `AllToAll`, planned in each pass."""
    dispatcher = AllToAll(group)

    def layer(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        plan = dispatcher.plan(ids, num_experts, None)
        got = dispatcher.dispatch(x, weights, plan)
        out = kernel(got.x, gate_up, down, got.weights, got.ids, None, num_rows=got.num_rows)
        return dispatcher.combine(out, plan)

    return layer


def gathered(
    ids: Tensor, num_experts: int, kernel: ExpertsFn, group: RankGroup, summed: Callable[[Tensor], Tensor]
) -> Layer:
    """All tokens on all ranks, and room for twice the mean number of choices."""
    num_local = num_experts // group.size

    def layer(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        local = gather(ids) - group.rank * num_local
        local = torch.where((local >= 0) & (local < num_local), local, num_local)
        everything = Gathered.apply(x, summed), gate_up, down, Gathered.apply(weights, summed), local
        return Summed.apply(kernel(*everything, num_rows=2 * ids.numel()), summed)

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
    probabilities = normal(num_tokens, num_experts).softmax(-1)
    ids = top_experts(probabilities, num_active)
    weights = probabilities.gather(-1, ids)
    gate_up = (normal(num_local, 2 * inner, width) * 0.02).to(dtype)
    down = (normal(num_local, width, inner) * 0.02).to(dtype)
    leaves = x, weights / weights.sum(-1, keepdim=True), gate_up, down
    for leaf in leaves:
        leaf.requires_grad_()
    kernel = EXPERTS.resolve(options.experts, ExpertsRequest(device.type, dtype, width, inner))
    layers = {
        "exact": exact(ids, num_experts, kernel, ranks),
        "gathered, reduced in bf16": gathered(ids, num_experts, kernel, ranks, reduce),
        "gathered, summed in fp32": gathered(ids, num_experts, kernel, ranks, reduce_wide),
    }
    local = lambda: torch.autograd.grad(kernel(x, gate_up, down, leaves[1], ids % num_local), leaves, grad)  # noqa: E731
    yield measured("this rank's experts, with nothing sent", local, device)
    expected = layers["exact"](*leaves).detach().double()
    for name, layer in layers.items():
        out = layer(*leaves).detach().double()
        assert (out - expected).norm() < 1e-2 * expected.norm(), name
        yield measured(name, lambda layer=layer: torch.autograd.grad(layer(*leaves), leaves, grad), device)
    if device.type == "cuda":
        for name, layer in list(layers.items())[1:]:
            yield measured(f"{name}, CUDA graph", graphed(layer, leaves, grad), device)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64], help="of each rank")
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
