"""Times a layer of experts, forward and backward, beside the grouped products that it is made of.

    uv run tools/bench_experts.py                                            # a tiny layer, to test the tool
    uv run tools/bench_experts.py --shape qwen3-30b --num-tokens 8192 16384 32768 --json experts.json
    uv run tools/bench_experts.py --shape qwen3-30b glm-4.5-air --num-tokens 8192 32768 \
        --implementations native quack fp8 --without-adapters                    # bf16 beside fp8

Routes are uneven, as a router that was not balanced spreads tokens. "adapted" are frozen experts with an adapter of
rank 16 on each, "shared" with one A of the up and one B of the down projection for all, "nf4" with frozen weights in
NF4. "fp8" includes casting weights, activations and gradients, in each pass; "casts" are those of the weights alone,
for the forward and for the backward pass. Prints a table in Markdown: milliseconds, and the rate of the products'
floating-point operations in each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from xorl.kernels.experts import EXPERTS, ExpertsFn, ExpertsRequest
from xorl.kernels.experts.adapted import Factors
from xorl.kernels.experts.plan import RoutePlan
from xorl.kernels.experts.quantized import ExpertsWeight, QuantizedExperts
from xorl.kernels.experts.routing import top_experts
from xorl.kernels.grouped import grouped_outer, grouped_product
from xorl.kernels.quant import QuantScheme
from xorl.kernels.quant.fp8 import E4M3, cast_rowwise, cast_stack_columnwise

RANK = 16
# D, F, E, K.
SHAPES = {"qwen3-30b": (2048, 768, 128, 8), "glm-4.5-air": (4096, 1408, 128, 8), "tiny": (32, 16, 8, 2)}


# The up and the down weights, and the factors of adapters.
Frozen: TypeAlias = tuple[tuple[ExpertsWeight, ExpertsWeight], list[Tensor]]


@dataclass(frozen=True)
class Row:
    """Median milliseconds of one kind of pass; TFLOP/s of the products in it."""

    shape: str
    num_tokens: int
    name: str
    milliseconds: float
    tflops: float


def median_ms(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Of `rounds` runs after two warm-up runs. On a GPU the runs are queued without waiting for one another."""
    times: list[float] = []
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 3)]
        for event in events:
            event.record()
            run()
        torch.cuda.synchronize()
        times = [first.elapsed_time(second) for first, second in pairwise(events)]
    else:
        for _ in range(rounds + 2):
            started = time.perf_counter()
            run()
            times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times[2:])


def frozen_kinds(gate_up: Tensor, down: Tensor, normal: Callable[..., Tensor]) -> dict[str, Frozen]:
    """The weights and the factors of adapters of each kind of frozen experts."""
    num_experts, width, inner = down.shape

    def quantized(weight: Tensor) -> QuantizedExperts:
        scheme, matrix = QuantScheme("nf4", 64 if weight.shape[2] % 64 == 0 else 16), weight.flatten(0, 1)
        return QuantizedExperts(scheme.quantize(matrix), scheme, num_experts, len(matrix))

    def factors(*, shared: bool) -> list[Tensor]:
        outer = 1 if shared else num_experts
        sizes = ((outer, RANK, width), (num_experts, 2 * inner, RANK), (num_experts, RANK, inner), (outer, width, RANK))
        return [normal(*size, scale=0.1).requires_grad_() for size in sizes]

    stored = quantized(gate_up), quantized(down)
    return {
        "adapted": ((gate_up, down), factors(shared=False)),
        "adapted, shared": ((gate_up, down), factors(shared=True)),
        "nf4": (stored, []),
        "nf4, adapted": (stored, factors(shared=False)),
    }


def adapted(
    experts: ExpertsFn,
    inputs: tuple[Tensor, ExpertsWeight, ExpertsWeight, Tensor, Tensor],
    leaves: Sequence[Tensor],
    grad: Tensor,
    low_rank: Sequence[Tensor],
) -> object:
    """A forward and a backward pass of frozen experts with or without adapters."""
    factors = None
    if low_rank:
        up_a, up_b, down_a, down_b = low_rank
        factors = Factors(up_a, up_b, down_a, down_b)
    return torch.autograd.grad(experts(*inputs, None, factors=factors), leaves, grad)


def rows_of(shape: str, num_tokens: int, names: list[str], rounds: int, *, without_adapters: bool) -> list[Row]:
    """A row for each implementation, forward, backward and both, and one for the products alone."""
    width, inner, num_experts, num_choices = SHAPES[shape]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*size, generator=generator, device=device) * scale
        return values.to(torch.bfloat16 if device.type == "cuda" else torch.float32)

    x = normal(num_tokens, width).requires_grad_()
    gate_up = normal(num_experts, 2 * inner, width, scale=width**-0.5).requires_grad_()
    down = normal(num_experts, width, inner, scale=inner**-0.5).requires_grad_()
    popularity = torch.randn(num_experts, generator=generator, device=device)
    logits = torch.randn(num_tokens, num_experts, generator=generator, device=device) + 0.7 * popularity
    scores = logits.softmax(-1)
    ids = top_experts(scores, num_choices)
    weights = scores.gather(-1, ids).requires_grad_()
    leaves, grad = (x, gate_up, down, weights), normal(num_tokens, width)
    flops = 2 * num_tokens * num_choices * width * 3 * inner
    rows: list[Row] = []

    def add(name: str, run: Callable[[], object], share: int) -> None:
        took = median_ms(run, device, rounds)
        rows.append(Row(shape, num_tokens, name, took, share * flops / took / 1e9))

    ends = RoutePlan.of(ids, num_experts).ends
    gathered, up, gated = (normal(num_tokens * num_choices, columns) for columns in (width, 2 * inner, inner))
    up_weight, down_weight = gate_up.detach(), down.detach()

    def products() -> None:
        grouped_product(gathered, up_weight.transpose(1, 2), ends)
        grouped_product(gated, down_weight.transpose(1, 2), ends)
        grouped_product(gathered, down_weight, ends)
        grouped_product(up, up_weight, ends)
        grouped_outer(gathered, gated, ends)
        grouped_outer(up, gathered, ends)

    add("products alone", products, 3)
    add("choice and plan", lambda: RoutePlan.of(top_experts(scores, num_choices), num_experts), 0)

    if "fp8" in names:
        stacks = up_weight, down_weight
        add("casts, forward", lambda: [cast_rowwise(weight.flatten(0, 1), E4M3) for weight in stacks], 0)
        add("casts, backward", lambda: [cast_stack_columnwise(weight, E4M3) for weight in stacks], 0)
    kinds = {} if without_adapters else frozen_kinds(up_weight, down_weight, normal)
    for name in names:
        experts = EXPERTS.resolve(name, ExpertsRequest(device.type, x.dtype, width, inner))
        add(f"{name} forward", lambda experts=experts: experts(*leaves, ids, None), 1)
        add(
            f"{name} forward and backward",
            lambda experts=experts: torch.autograd.grad(experts(*leaves, ids, None), leaves, grad),
            3,
        )
        add(
            f"{name} forward and backward, frozen",
            lambda experts=experts: torch.autograd.grad(
                experts(x, up_weight, down_weight, weights, ids, None), (x, weights), grad
            ),
            2,
        )
        for kind, (base, low_rank) in kinds.items():
            given = (x, *base, weights, ids), (x, weights, *low_rank), grad
            add(f"{name} forward and backward, {kind}", partial(adapted, experts, *given, low_rank), 2)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["tiny"])
    parser.add_argument("--num-tokens", nargs="+", type=int, default=[256])
    parser.add_argument("--implementations", nargs="+", choices=EXPERTS.names, default=["native"])
    parser.add_argument("--without-adapters", action="store_true", help="leave out adapters and quantised experts")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    print("| shape | tokens | pass | ms | TFLOP/s |")
    print("|---|---|---|---|---|")
    for shape, num_tokens in product(options.shape, options.num_tokens):
        names, without_adapters = options.implementations, options.without_adapters
        for row in rows_of(shape, num_tokens, names, options.rounds, without_adapters=without_adapters):
            rows.append(row)
            took = f"{row.milliseconds:.3f} | {row.tflops:.1f}"
            print(f"| {row.shape} | {row.num_tokens} | {row.name} | {took} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
