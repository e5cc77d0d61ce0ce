"""Experts by grouped matrix products, with an explicit backward pass (the algorithm of SonicMoE, 2025).

The backward pass needs x, the up product and the routing weights; it recomputes the activation, and it takes the
gradient of the routing weights from the activation, so the down product is not kept. Rows are gathered and summed in a
fixed order, never added atomically: a repeated run computes the same bits. The products come from one of several
implementations (`products`). Between them, one Triton kernel each reads and writes every row once (`rows_triton`);
without Triton, and in fp64, plain torch does (`rows`).

Shapes: T tokens, K experts per token, M rows (T * K, or fewer), D model width, F width of an expert, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from xorl.kernels.experts.adapted import Factors, adapted_experts, no_factors
from xorl.kernels.experts.arguments import check_experts
from xorl.kernels.experts.plan import RoutePlan
from xorl.kernels.experts.products import Rows, between_products, products_of
from xorl.kernels.experts.quantized import ExpertsWeight

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def experts(
    x: Tensor,
    gate_up: ExpertsWeight,
    down: ExpertsWeight,
    weights: Tensor,
    ids: Tensor,
    num_real: Tensor | None = None,
    *,
    num_rows: int | None = None,
    recompute: bool = False,
    factors: Factors | None = None,
    products: str = "native",
) -> Tensor:
    """As `reference.experts` with silu; [T, D].

    Args:
        x: [T, D].
        gate_up: [E, 2F, D], in the dtype of x or quantised.
        down: [E, D, F], as gate_up.
        weights: [T, K] fp32.
        ids: [T, K] int64 in [0, E]; E is a choice without an expert, which adds nothing. On a GPU the values are not
            checked, since the host would wait: the result of others is undefined.
        num_real: 0-d integer tensor; the output of tokens from this index on, which are padding, is 0.
        num_rows: how many choices have an expert, if the host knows it; the others then need no memory.
        recompute: compute the up product again in the backward pass instead of keeping it.
        factors: of adapters. With these, or quantised weights, the weights of the experts must be frozen.
        products: the implementation of the products: native, triton or quack.

    Raises ValueError for shapes, dtypes or devices that do not fit and, on a CPU, for ids out of range and too small a
    num_rows.
    """
    check_experts(x, gate_up, down, weights, ids, num_real, num_rows, factors)
    if factors is None and isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        plan = RoutePlan.of(ids, len(gate_up), num_real, num_rows)
        out, _ = _experts(x, gate_up, down, weights, *plan, recompute, products)
        return out
    return adapted_experts(
        x,
        gate_up,
        down,
        weights,
        ids,
        num_real,
        no_factors(x, gate_up) if factors is None else factors,
        num_rows=num_rows,
        recompute=recompute,
        products=products,
    )


@torch.library.custom_op("xorl::experts", mutates_args=())
def _experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    choices: Tensor,
    rows: Tensor,
    ends: Tensor,
    recompute: bool,
    products: str,
) -> tuple[Tensor, Tensor]:
    if not len(choices):  # no product has to support an empty operand
        return torch.zeros_like(x, memory_format=torch.contiguous_format), x.new_empty(0)
    by = products_of(products)
    tokens = choices // rows.shape[1]
    up, gated = by.gated(by.gather(x, tokens), gate_up.transpose(1, 2), ends, keep_up=not recompute)
    y = by.product(Rows(gated), down.transpose(1, 2), ends)  # [M, D]
    return between_products(x).combine(y, weights, rows, ends), up


@_experts.register_fake
def _(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    choices: Tensor,
    rows: Tensor,
    ends: Tensor,
    recompute: bool,
    products: str,
) -> tuple[Tensor, Tensor]:
    up = x.new_empty(0) if recompute else x.new_empty(choices.shape[0], gate_up.shape[1])
    return torch.empty_like(x, memory_format=torch.contiguous_format), up


@torch.library.custom_op("xorl::experts_backward", mutates_args=())
def _experts_backward(
    grad: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    choices: Tensor,
    rows: Tensor,
    ends: Tensor,
    up: Tensor,
    trains_experts: bool,
    products: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not len(choices):
        of_experts = [torch.zeros_like(w) if trains_experts else x.new_empty(0) for w in (gate_up, down)]
        grad_x = torch.zeros_like(x, memory_format=torch.contiguous_format)
        return grad_x, of_experts[0], of_experts[1], torch.zeros_like(weights)
    by, between = products_of(products), between_products(x)
    tokens = choices // rows.shape[1]
    gathered, grad_rows = by.gather(x, tokens), by.gather(grad, tokens)
    if not up.numel():
        up = by.product(gathered, gate_up.transpose(1, 2), ends)
    grad_gated = by.product(grad_rows, down, ends)  # [M, F], before the routing weight
    grad_up, weighted, grad_weights = between.gated_backward(grad_gated, up, weights, choices, ends)
    grad_down = by.outer(grad_rows, Rows(weighted), ends) if trains_experts else x.new_empty(0)
    grad_gate_up = by.outer(Rows(grad_up), gathered, ends) if trains_experts else x.new_empty(0)
    grad_x = between.combine(by.product(Rows(grad_up), gate_up, ends), None, rows, ends)
    return grad_x, grad_gate_up, grad_down, grad_weights


@_experts_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    choices: Tensor,
    rows: Tensor,
    ends: Tensor,
    up: Tensor,
    trains_experts: bool,
    products: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        gate_up.new_empty(gate_up.shape if trains_experts else 0),
        down.new_empty(down.shape if trains_experts else 0),
        weights.new_empty(weights.shape),
    )


class _Context(FunctionCtx):
    saved_tensors: Saved
    needs_input_grad: tuple[bool, ...]
    products: str


def _save(ctx: _Context, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.products = inputs[8]
    ctx.save_for_backward(*inputs[:7], output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: _Context, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    trains_experts = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    grad_x, grad_gate_up, grad_down, grad_weights = _experts_backward(
        grad.contiguous(), *ctx.saved_tensors, trains_experts, ctx.products
    )
    grads = (grad_gate_up, grad_down) if trains_experts else (None, None)
    return grad_x, *grads, grad_weights, None, None, None, None, None


_experts.register_autograd(_differentiate, setup_context=_save)
