"""Experts by grouped matrix products, with an explicit backward pass (the algorithm of SonicMoE, 2025).

The backward pass needs x, the up product and the routing weights; it recomputes the activation, and it takes the
gradient of the routing weights from the activation, so the down product is not kept. Rows are gathered and summed in a
fixed order, never added atomically: a repeated run computes the same bits. The products come from one of several
implementations (`products`). Between them, one Triton kernel each reads and writes every row once (`rows_triton`);
without Triton, and in fp64, plain torch does (`rows`).

Shapes: T tokens, K experts per token, M rows (T * K, or fewer), D model width, F width of an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from xorl.kernels.experts.adapted import Factors, adapted_experts, no_factors
from xorl.kernels.experts.arguments import check_experts
from xorl.kernels.experts.gates import SILU, Biases, Gate, some, with_down_biases
from xorl.kernels.experts.plan import RoutePlan
from xorl.kernels.experts.products import Products, Rows, adding_products, between_products, products_of
from xorl.kernels.experts.quantized import ExpertsWeight
from xorl.kernels.grouped import ALIGNMENT_BYTES


def experts(
    x: Tensor,
    gate_up: ExpertsWeight,
    down: ExpertsWeight,
    weights: Tensor,
    ids: Tensor,
    num_real: Tensor | None = None,
    *,
    num_rows: int | None = None,
    num_passes: int = 1,
    gate: Gate = SILU,
    biases: Biases | None = None,
    recompute: bool = False,
    factors: Factors | None = None,
    products: str = "native",
) -> Tensor:
    """As `reference.experts`; [T, D].

    Args:
        x: [T, D].
        gate_up: [E, 2F, D], in the dtype of x or quantised.
        down: [E, D, F], as gate_up.
        weights: [T, K] fp32.
        ids: [T, K] int64 in [0, E]; E is a choice without an expert, which adds nothing. On a GPU the values are not
            checked, since the host would wait: the result of others is undefined.
        num_real: 0-d integer tensor; the output of tokens from this index on, which are padding, is 0.
        num_rows: how many choices have an expert, if the host knows it; the others then need no memory.
        num_passes: how many parts of the choices are computed one after another, in the memory of one. The choices with
            an expert come first, so if there are few, the last parts are empty, which takes little time, and the host
            need not know. Only what the first part needs is kept for the backward pass.
        gate: the activation.
        biases: of the experts; None: there are none.
        recompute: compute the up product again in the backward pass instead of keeping it.
        factors: of adapters. With these, or quantised weights, weights and biases of the experts must be frozen.
        products: the implementation of the products: native, triton, quack or fp8.

    Raises ValueError for shapes, dtypes or devices that do not fit and, on a CPU, for ids out of range and too small a
    num_rows.
    """
    check_experts(x, gate_up, down, weights, ids, num_real, num_rows, factors, biases, gate)
    up_biases = x.new_empty(0) if biases is None else biases.gate_up
    if factors is None and isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        plan = RoutePlan.of(ids, len(gate_up), num_real, num_rows)
        out, _ = experts_of_plan(x, gate_up, down, weights, *plan, up_biases, num_passes, recompute, products, gate)
    else:
        out = adapted_experts(
            x,
            gate_up,
            down,
            weights,
            ids,
            num_real,
            no_factors(x, gate_up, gate) if factors is None else factors,
            up_biases,
            num_rows=num_rows,
            num_passes=num_passes,
            recompute=recompute,
            products=products,
            gate=gate,
        )
    if biases is None:
        return out
    return with_down_biases(out, biases.down, weights, ids, num_real, 1 if factors is None else factors.num_slots)


@torch.library.custom_op("xorl::experts", mutates_args=())
def experts_of_plan(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    choices: Tensor,
    rows: Tensor,
    ends: Tensor,
    up_biases: Tensor,
    num_passes: int,
    recompute: bool,
    products: str,
    gate: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """The output without the biases of the down projection, and the up product of the first pass without biases.

    Arguments as of `experts`; choices, rows, ends: of the plan.
    up_biases: [E, 2F], or empty.
    """
    if not len(choices):  # no product has to support an empty operand
        return torch.zeros_like(x, memory_format=torch.contiguous_format), x.new_empty(0)
    between, out, up = between_products(x), None, x.new_empty(0)
    for index, plan in enumerate(RoutePlan(choices, rows, ends).parts(num_passes)):
        if not len(plan.choices):
            continue
        by, keep_up = _products_of_pass(index, products, x), index == 0 and not recompute
        gathered = by.gather(x, plan.choices // rows.shape[1])
        weight, added = gate_up.transpose(1, 2), some(up_biases)
        kept, gated = by.gated(gathered, weight, plan.ends, Gate(*gate), added, keep_up=keep_up)
        y = by.product(Rows(gated), down.transpose(1, 2), plan.ends)  # [M, D]
        out = between.combine(y, weights, plan.rows, plan.ends, out)
        up = kept if keep_up else up
    assert out is not None, "the first pass has choices"
    return out, up


@experts_of_plan.register_fake
def _(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    choices: Tensor,
    rows: Tensor,
    ends: Tensor,
    up_biases: Tensor,
    num_passes: int,
    recompute: bool,
    products: str,
    gate: Sequence[float],
) -> tuple[Tensor, Tensor]:
    num_rows = -(-choices.shape[0] // num_passes)
    up = x.new_empty(0) if recompute else x.new_empty(num_rows, gate_up.shape[1])
    return torch.empty_like(x, memory_format=torch.contiguous_format), up


@torch.library.custom_op("xorl::experts_backward", mutates_args=())
def experts_of_plan_backward(
    grad: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    choices: Tensor,
    rows: Tensor,
    ends: Tensor,
    up_biases: Tensor,
    up: Tensor,
    num_passes: int,
    trains_experts: bool,
    products: str,
    gate: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, gate_up, down, weights and up_biases; empty ones of the experts unless `trains_experts`.

    up: as `experts_of_plan` returns it; empty to compute it again.
    """
    grad_weights = torch.zeros_like(weights, memory_format=torch.contiguous_format)
    if not len(choices):
        given = gate_up, down, up_biases
        of_experts = [torch.zeros_like(w) if trains_experts else x.new_empty(0) for w in given]
        grad_x = torch.zeros_like(x, memory_format=torch.contiguous_format)
        return grad_x, of_experts[0], of_experts[1], grad_weights, of_experts[2]
    between, grad_x = between_products(x), None
    grad_gate_up, grad_down, grad_biases = x.new_empty(0), x.new_empty(0), x.new_empty(0)
    for index, plan in enumerate(RoutePlan(choices, rows, ends).parts(num_passes)):
        if not len(plan.choices):
            continue
        by = _products_of_pass(index, products, x)
        tokens = plan.choices // rows.shape[1]
        gathered, grad_rows = by.gather(x, tokens), by.gather(grad, tokens)
        kept = up if index == 0 else x.new_empty(0)
        if not kept.numel():
            kept = by.product(gathered, gate_up.transpose(1, 2), plan.ends)
        grad_gated = by.product(grad_rows, down, plan.ends)  # [M, F], before the routing weight
        added = some(up_biases)
        grad_up, weighted = between.gated_backward(
            grad_gated, kept, weights, plan.choices, plan.ends, grad_weights, Gate(*gate), added
        )
        if trains_experts and added is not None:
            sums = _sum_by_expert(grad_up, plan.ends)
            grad_biases = sums if index == 0 else grad_biases + sums
        pairs = (grad_rows, Rows(weighted)), (Rows(grad_up), gathered)
        if trains_experts and index == 0:
            grad_down, grad_gate_up = (by.outer(left, right, plan.ends) for left, right in pairs)
        elif trains_experts:
            for total, (left, right) in zip((grad_down, grad_gate_up), pairs, strict=True):
                adding_products(x).add_outer(total, left, right, plan.ends)
        grad_x = between.combine(by.product(Rows(grad_up), gate_up, plan.ends), None, plan.rows, plan.ends, grad_x)
    assert grad_x is not None, "the first pass has choices"
    return grad_x, grad_gate_up, grad_down, grad_weights, grad_biases


def _sum_by_expert(rows: Tensor, ends: Tensor) -> Tensor:
    """The sums [E, N] of the rows [M, N] of each expert."""
    ones = rows.new_ones(len(rows), ALIGNMENT_BYTES // rows.element_size())
    return adding_products(rows).outer(Rows(ones), Rows(rows), ends)[:, 0].contiguous()


def _products_of_pass(index: int, products: str, x: Tensor) -> Products:
    """The implementation `products` for the first pass, and the one that takes least for empty parts for the others.

    Other products would not round as those in fp8 do.
    """
    return products_of(products) if index == 0 or products == "fp8" else adding_products(x)


@experts_of_plan_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    choices: Tensor,
    rows: Tensor,
    ends: Tensor,
    up_biases: Tensor,
    up: Tensor,
    num_passes: int,
    trains_experts: bool,
    products: str,
    gate: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        gate_up.new_empty(gate_up.shape if trains_experts else 0),
        down.new_empty(down.shape if trains_experts else 0),
        weights.new_empty(weights.shape),
        up_biases.new_empty(up_biases.shape if trains_experts else 0),
    )


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    num_passes: int
    products: str
    gate: Sequence[float]


def _save(ctx: _Context, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.num_passes, recompute, ctx.products, ctx.gate = inputs[8:]
    # If the backward pass needs no output, a compiler can leave this operator out of a layer that is recomputed.
    ctx.save_for_backward(*inputs[:8], *([] if recompute else [output[1]]))
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: _Context, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    trains_experts = any(ctx.needs_input_grad[index] for index in (1, 2, 7))
    x, gate_up, down, weights, choices, rows, ends, up_biases, *kept = ctx.saved_tensors
    up = kept[0] if kept else x.new_empty(0)
    given = grad.contiguous(), x, gate_up, down, weights, choices, rows, ends, up_biases, up
    grad_x, grad_gate_up, grad_down, grad_weights, grad_biases = experts_of_plan_backward(
        *given, ctx.num_passes, trains_experts, ctx.products, ctx.gate
    )
    grads = (grad_gate_up, grad_down) if trains_experts else (None, None)
    of_biases = grad_biases if trains_experts and up_biases.numel() else None
    return grad_x, *grads, grad_weights, None, None, None, of_biases, None, None, None, None


experts_of_plan.register_autograd(_differentiate, setup_context=_save)
