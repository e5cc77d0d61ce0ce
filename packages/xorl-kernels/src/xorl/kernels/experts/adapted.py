"""Experts with a low-rank adapter on each of them, by grouped products with an explicit backward pass.

The adapters' products are grouped like those of the experts, so no weight is ever merged. The base is frozen: only the
input, the routing weights and the adapters get gradients. Otherwise as `grouped`.

Shapes: T tokens, K experts per token, M rows (T * K, or fewer), D model width, F width of an expert, E experts, R and S
ranks of the adapters of the up and the down projection.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from xorl.kernels.experts.plan import RoutePlan
from xorl.kernels.experts.products import Products, Rows, between_products, products_of


class Factors(NamedTuple):
    """What adapters add to the weights of experts: gate_up[e] + up_b[e] @ up_a[e] and down[e] + down_b[e] @ down_a[e].

    Scales are part of the factors, which have the dtype of the input. A rank of 0 adds nothing.

    up_a: [E, R, D].
    up_b: [E, 2F, R], the gate's rows first.
    down_a: [E, S, F].
    down_b: [E, D, S].
    x: [T, D], what the adapters of the up projection are applied to if it is not the input itself (dropout).
    kept: probability that an element of the down projection's input is kept for its adapter (dropout).
    """

    up_a: Tensor
    up_b: Tensor
    down_a: Tensor
    down_b: Tensor
    x: Tensor | None = None
    kept: float = 1.0


def adapted_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    num_real: Tensor | None,
    factors: Factors,
    *,
    num_rows: int | None,
    recompute: bool,
    products: str,
) -> Tensor:
    """As `grouped.experts`, with adapters; [T, D]."""
    plan = RoutePlan.of(ids, len(gate_up), num_real, num_rows)
    mask = x.new_empty(0, dtype=torch.bool)
    if factors.kept < 1:
        mask = torch.rand(len(plan.choices), down.shape[2], device=x.device) < factors.kept
    out, _ = _adapted(
        x,
        x.new_empty(0) if factors.x is None else factors.x,
        gate_up,
        down,
        *factors[:4],
        weights,
        mask,
        *plan,
        factors.kept,
        recompute,
        products,
    )
    return out


def _low(by: Products, rows: Rows, a: Tensor, ends: Tensor) -> Tensor:
    """[M, R], what the first factors of adapters make of rows; empty for a rank of 0."""
    return by.product(rows, a.transpose(1, 2), ends) if a.numel() else rows.values.new_empty(0)


def _up(by: Products, gathered: Rows, low: Tensor, gate_up: Tensor, up_b: Tensor, ends: Tensor) -> Tensor:
    """[M, 2F], the up product with its adapter."""
    up = by.product(gathered, gate_up.transpose(1, 2), ends)
    return up.add_(by.product(Rows(low), up_b.transpose(1, 2), ends)) if low.numel() else up


def _dropped(rows: Tensor, mask: Tensor, kept: float) -> Tensor:
    return torch.where(mask, rows / kept, 0) if mask.numel() else rows


@torch.library.custom_op("xorl::adapted_experts", mutates_args=())
def _adapted(
    x: Tensor,
    x_low: Tensor,
    gate_up: Tensor,
    down: Tensor,
    up_a: Tensor,
    up_b: Tensor,
    down_a: Tensor,
    down_b: Tensor,
    weights: Tensor,
    mask: Tensor,
    choices: Tensor,
    rows: Tensor,
    ends: Tensor,
    kept: float,
    recompute: bool,
    products: str,
) -> tuple[Tensor, Tensor]:
    """`x_low` and `mask` are empty without dropout."""
    if not len(choices):
        return torch.zeros_like(x, memory_format=torch.contiguous_format), x.new_empty(0)
    by, between = products_of(products), between_products(x)
    tokens = choices // rows.shape[1]
    gathered = by.gather(x, tokens)
    low = _low(by, by.gather(x_low, tokens) if x_low.numel() else gathered, up_a, ends)
    up = _up(by, gathered, low, gate_up, up_b, ends)
    inner = between.gated(up)
    y = by.product(Rows(inner), down.transpose(1, 2), ends)
    if down_a.numel():
        low = _low(by, Rows(_dropped(inner, mask, kept)), down_a, ends)
        y += by.product(Rows(low), down_b.transpose(1, 2), ends)
    return between.combine(y, weights, rows, ends), x.new_empty(0) if recompute else up


@_adapted.register_fake
def _(
    x: Tensor,
    x_low: Tensor,
    gate_up: Tensor,
    down: Tensor,
    up_a: Tensor,
    up_b: Tensor,
    down_a: Tensor,
    down_b: Tensor,
    weights: Tensor,
    mask: Tensor,
    choices: Tensor,
    rows: Tensor,
    ends: Tensor,
    kept: float,
    recompute: bool,
    products: str,
) -> tuple[Tensor, Tensor]:
    up = x.new_empty(0) if recompute else x.new_empty(choices.shape[0], gate_up.shape[1])
    return torch.empty_like(x, memory_format=torch.contiguous_format), up


@torch.library.custom_op("xorl::adapted_experts_backward", mutates_args=())
def _adapted_backward(
    grad: Tensor,
    x: Tensor,
    x_low: Tensor,
    gate_up: Tensor,
    down: Tensor,
    up_a: Tensor,
    up_b: Tensor,
    down_a: Tensor,
    down_b: Tensor,
    weights: Tensor,
    mask: Tensor,
    choices: Tensor,
    rows: Tensor,
    ends: Tensor,
    up: Tensor,
    kept: float,
    products: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, x_low (empty if that is), the four factors and the weights."""
    if not len(choices):
        given = (x, x_low, up_a, up_b, down_a, down_b, weights)
        zeros = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in given]
        return zeros[0], zeros[1], zeros[2], zeros[3], zeros[4], zeros[5], zeros[6]
    by, between = products_of(products), between_products(x)
    tokens = choices // rows.shape[1]
    gathered, grad_rows = by.gather(x, tokens), by.gather(grad, tokens)
    source = by.gather(x_low, tokens) if x_low.numel() else gathered
    low = _low(by, source, up_a, ends)
    if not up.numel():
        up = _up(by, gathered, low, gate_up, up_b, ends)
    # Before the routing weight: its gradient is the product of these and the experts' inner activations.
    grad_inner = by.product(grad_rows, down, ends)  # [M, F]
    grad_low = x.new_empty(0)
    if down_a.numel():
        grad_low = by.product(grad_rows, down_b, ends)  # [M, S]
        grad_inner += _dropped(by.product(Rows(grad_low), down_a, ends), mask, kept)
    grad_up, weighted, grad_weights = between.gated_backward(grad_inner, up, weights, choices, ends)
    grad_down_a, grad_down_b = torch.zeros_like(down_a), torch.zeros_like(down_b)
    if down_a.numel():
        weighted = _dropped(weighted, mask, kept)
        grad_down_a = by.outer(Rows(grad_low), Rows(weighted), ends)
        grad_down_b = by.outer(grad_rows, Rows(_low(by, Rows(weighted), down_a, ends)), ends)
    grad_x = by.product(Rows(grad_up), gate_up, ends)
    if not up_a.numel():
        grad_x, zeros = (
            between.combine(grad_x, None, rows, ends),
            [torch.zeros_like(one) for one in (x_low, up_a, up_b)],
        )
        return grad_x, zeros[0], zeros[1], zeros[2], grad_down_a, grad_down_b, grad_weights
    grad_up_b = by.outer(Rows(grad_up), Rows(low), ends)
    grad_low = by.product(Rows(grad_up), up_b, ends)  # [M, R]
    grad_up_a = by.outer(Rows(grad_low), source, ends)
    of_low = by.product(Rows(grad_low), up_a, ends)
    if x_low.numel():
        grad_x_low = between.combine(of_low, None, rows, ends)
    else:
        grad_x, grad_x_low = grad_x.add_(of_low), x_low.clone()
    grad_x = between.combine(grad_x, None, rows, ends)
    return grad_x, grad_x_low, grad_up_a, grad_up_b, grad_down_a, grad_down_b, grad_weights


@_adapted_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    x_low: Tensor,
    gate_up: Tensor,
    down: Tensor,
    up_a: Tensor,
    up_b: Tensor,
    down_a: Tensor,
    down_b: Tensor,
    weights: Tensor,
    mask: Tensor,
    choices: Tensor,
    rows: Tensor,
    ends: Tensor,
    up: Tensor,
    kept: float,
    products: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(x_low, memory_format=torch.contiguous_format),
        up_a.new_empty(up_a.shape),
        up_b.new_empty(up_b.shape),
        down_a.new_empty(down_a.shape),
        down_b.new_empty(down_b.shape),
        weights.new_empty(weights.shape),
    )


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    kept: float
    products: str


def _save(ctx: _Context, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.kept, ctx.products = inputs[13], inputs[15]
    ctx.save_for_backward(*inputs[:13], output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: _Context, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    assert not any(ctx.needs_input_grad[2:4]), "the weights of experts with adapters are frozen"
    saved = ctx.saved_tensors  # once: recomputation unpacks them
    grad_x, grad_x_low, *of_factors, grad_weights = _adapted_backward(grad.contiguous(), *saved, ctx.kept, ctx.products)
    has_low = saved[1].numel() > 0
    nones = (None,) * 7
    return grad_x, grad_x_low if has_low else None, None, None, *of_factors, grad_weights, *nones


_adapted.register_autograd(_differentiate, setup_context=_save)
