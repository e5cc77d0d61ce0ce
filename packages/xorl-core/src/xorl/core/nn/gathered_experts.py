"""The experts of a layer and the communication around them, as one operator that needs no sizes from the host.

With the tokens of all ranks gathered (`all_gather`), sizes depend only on the number of tokens. So the forward and the
backward pass of a layer's experts are the same sequence of kernels in every step, and a CUDA graph replays it in one
launch (`graphs`). With few tokens, launching these kernels one by one takes the host longer than the GPU computes.

The backward pass computes everything again from the input, so a layer that is recomputed need not repeat its experts.

Shapes: T tokens of this rank, M tokens of the rank that has most, K experts per token, E experts on P ranks, L = E / P
of this rank, D model width, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from xorl.core.graphs import Compute, graphs_of
from xorl.core.nn import all_gather
from xorl.core.nn.all_gather import ALONE, AllGather, GatherPlan, padded, passes_of
from xorl.kernels.experts.gates import Gate
from xorl.kernels.experts.grouped import experts_of_plan, experts_of_plan_backward
from xorl.kernels.experts.plan import RoutePlan

# Tokens of the rank that has most. With more, the GPU computes a layer's experts for longer than the host launches
# them, and a graph would only hold memory of its own.
MAX_GRAPH_TOKENS = 8192


def gathered_experts(
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    dispatcher: AllGather,
    plan: GatherPlan,
    *,
    products: str,
    gate: Gate,
) -> Tensor:
    """The sums [T, D] of the weighted experts of all ranks; collective, as its backward pass is.

    Args:
        x: [T, D].
        weights: [T, K] fp32.
        gate_up: [L, 2F, D], of this rank's experts; without biases.
        down: [L, D, F].
        plan: of `dispatcher`.
        products, gate: as in `xorl.kernels.experts.grouped`.
    """
    rank, size, _ = dispatcher.group
    ranks = rank, size, dispatcher.group_name, dispatcher.graphs.number
    ids, num_missing, num_experts = plan
    return _gathered_experts(x, weights, ids, gate_up, down, num_missing, num_experts, *ranks, products, gate)


def graph_bytes(num_tokens: int, num_active: int, num_ranks: int, gate_up: Tensor, down: Tensor) -> int:
    """About how much memory the graphs of all layers hold, beside what a pass takes; 0 if there are none.

    Args:
        num_tokens: M.
        num_active: K.
        num_ranks: P.
        gate_up: [L * 2F, D], the weights of this rank in the compute dtype; a meta tensor will do.
        down: [L * D, F].
    """
    if num_tokens > MAX_GRAPH_TOKENS:
        return 0
    width, inner = gate_up.shape[1], down.shape[1]
    num_gathered = num_tokens * num_ranks
    num_rows = num_gathered * num_active // passes_of(num_ranks)
    # Tokens, their gradients, sums and what is sent; three rows of each choice, and its up product and activation with
    # their gradients; gradients of the weights.
    values = 4 * num_gathered * width + num_rows * (3 * width + 6 * inner) + gate_up.numel() + down.numel()
    return values * gate_up.element_size()


@torch.library.custom_op("xorl::gathered_experts", mutates_args=())
def _gathered_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    num_missing: int,
    num_experts: int,
    rank: int,
    num_ranks: int,
    group_name: str,
    graphs: int,
    products: str,
    gate: Sequence[float],
) -> Tensor:
    def compute(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor]:
        all_x, all_weights, plan = _gathered(x, weights, ids, num_experts, rank, num_ranks, group_name)
        nothing = x.new_empty(0)
        out, _ = experts_of_plan(
            all_x, gate_up, down, all_weights, *plan, nothing, passes_of(num_ranks), True, products, gate
        )
        return (all_gather.reduce_rows(out, len(x), num_ranks, group_name),)

    copied = _with_missing(num_missing, num_experts, x, weights, ids)
    constants = "forward", num_experts, rank, num_ranks, group_name, products, *gate
    (out,) = _run(compute, copied, (gate_up, down), constants, group_name, graphs)
    return out[: len(x)]


@_gathered_experts.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("xorl::gathered_experts_backward", mutates_args=())
def _gathered_experts_backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    num_missing: int,
    num_experts: int,
    rank: int,
    num_ranks: int,
    group_name: str,
    graphs: int,
    products: str,
    gate: Sequence[float],
    trains_experts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def compute(grad: Tensor, x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> tuple:
        all_x, all_weights, plan = _gathered(x, weights, ids, num_experts, rank, num_ranks, group_name)
        all_grad, nothing = all_gather.gather_rows(grad, 0, num_ranks, group_name), x.new_empty(0)
        given = all_grad, all_x, gate_up, down, all_weights, *plan, nothing, nothing
        grad_x, grad_gate_up, grad_down, grad_weights, _ = experts_of_plan_backward(
            *given, passes_of(num_ranks), trains_experts, products, gate
        )
        of_tokens = all_gather.reduce_tokens(grad_x, grad_weights, len(x), num_ranks, group_name)
        return *of_tokens, grad_gate_up, grad_down

    copied = _with_missing(num_missing, num_experts, grad, x, weights, ids)
    constants = "backward", num_experts, rank, num_ranks, group_name, products, *gate, trains_experts
    grad_x, grad_weights, *of_experts = _run(compute, copied, (gate_up, down), constants, group_name, graphs)
    return grad_x[: len(x)], grad_weights[: len(x)], of_experts[0], of_experts[1]


@_gathered_experts_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, *constants: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, trains_experts = constants
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(weights, memory_format=torch.contiguous_format),
        gate_up.new_empty(gate_up.shape if trains_experts else 0),
        down.new_empty(down.shape if trains_experts else 0),
    )


def _gathered(
    x: Tensor, weights: Tensor, ids: Tensor, num_experts: int, rank: int, num_ranks: int, group_name: str
) -> tuple[Tensor, Tensor, RoutePlan]:
    """The tokens [P * M, D] of all ranks, their weights [P * M, K], and the plan of this rank's experts."""
    all_x, all_weights, all_ids = all_gather.gather_tokens(x, weights, ids, 0, num_experts, rank, num_ranks, group_name)
    return all_x, all_weights, RoutePlan.of(all_ids, num_experts // num_ranks)


def _with_missing(num_missing: int, num_experts: int, *inputs: Tensor) -> list[Tensor]:
    """Inputs of T tokens, of which the last are ids, with rows for the tokens that this rank has less than another."""
    *values, ids = inputs
    return [*(padded(each, num_missing) for each in values), padded(ids, num_missing, num_experts)]


def _run(
    compute: Compute,
    copied: Sequence[Tensor],
    fixed: Sequence[Tensor],
    constants: tuple[object, ...],
    group_name: str,
    graphs: int,
) -> tuple[Tensor, ...]:
    """`compute(*copied, *fixed)`, in a graph where that pays."""
    is_long = len(copied[0]) > MAX_GRAPH_TOKENS
    if is_long or copied[0].device.type != "cuda" or group_name == ALONE:
        return compute(*copied, *fixed)
    return graphs_of(graphs).run(compute, copied, fixed, constants)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    constants: tuple


def _save(ctx: _Context, inputs: tuple, output: Tensor) -> None:
    ctx.constants = inputs[5:]
    ctx.save_for_backward(*inputs[:5])


def _differentiate(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    trains_experts = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    grad_x, grad_weights, *of_experts = _gathered_experts_backward(
        grad.contiguous(), *ctx.saved_tensors, *ctx.constants, trains_experts
    )
    return grad_x, grad_weights, None, *(of_experts if trains_experts else (None, None)), *[None] * len(ctx.constants)


_gathered_experts.register_autograd(_differentiate, setup_context=_save)
