"""Experts by torch's grouped matrix products, with an explicit backward pass (the algorithm of SonicMoE, 2025).

The backward pass needs x, the up product and the routing weights; it recomputes the activation, and it takes the
gradient of the routing weights from the activation, so the down product is not kept. Rows are gathered and summed in a
fixed order, never added atomically: a repeated run computes the same bits.

Shapes: T tokens, K experts per token, M = T * K rows, D model width, F width of an expert, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from xorl.kernels.experts.plan import RoutePlan
from xorl.kernels.grouped import grouped_outer, grouped_product

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    num_real: Tensor | None = None,
    *,
    recompute: bool = False,
) -> Tensor:
    """As `reference.experts` with silu; [T, D].

    Args:
        x: [T, D].
        gate_up: [E, 2F, D], in the dtype of x.
        down: [E, D, F], in the dtype of x.
        weights: [T, K] fp32.
        ids: [T, K] integers in [0, E).
        num_real: 0-d integer tensor; the output of tokens from this index on, which are padding, is 0.
        recompute: compute the up product again in the backward pass instead of keeping it.
    """
    plan = RoutePlan.of(ids, len(gate_up), num_real)
    out, _ = _experts(x, gate_up, down, weights, *plan, recompute)
    return out


@torch.library.custom_op("xorl::experts_native", mutates_args=())
def _experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    tokens: Tensor,
    rows: Tensor,
    ends: Tensor,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    up = grouped_product(x[tokens], gate_up.transpose(1, 2), ends)  # [M, 2F]
    y = grouped_product(_gated(up), down.transpose(1, 2), ends)  # [M, D]
    out = _combine(y, weights, rows, ends).to(x.dtype)
    return out, up.new_empty(0) if recompute else up


@_experts.register_fake
def _(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    tokens: Tensor,
    rows: Tensor,
    ends: Tensor,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    up = x.new_empty(0) if recompute else x.new_empty(tokens.shape[0], gate_up.shape[1])
    return torch.empty_like(x, memory_format=torch.contiguous_format), up


@torch.library.custom_op("xorl::experts_native_backward", mutates_args=())
def _experts_backward(
    grad: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    tokens: Tensor,
    rows: Tensor,
    ends: Tensor,
    up: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gathered = x[tokens]
    if not up.numel():
        up = grouped_product(gathered, gate_up.transpose(1, 2), ends)
    grad_rows = grad[tokens]
    grad_gated = grouped_product(grad_rows, down, ends).to(weights.dtype)  # [M, F], before the routing weight
    gate, value = up.to(weights.dtype).chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    gated = gate * sigmoid * value
    by_row = torch.zeros(len(tokens), dtype=weights.dtype, device=x.device)
    by_row[rows.flatten()] = weights.flatten()
    grad_weights = _of_choices((grad_gated * gated).sum(-1), rows, ends)
    grad_down = grouped_outer(grad_rows, (gated * by_row[:, None]).to(x.dtype), ends)
    grad_gated = grad_gated * by_row[:, None]
    grad_gate = grad_gated * value * sigmoid * (1 + gate * (1 - sigmoid))
    grad_up = torch.cat([grad_gate, grad_gated * gate * sigmoid], dim=-1).to(x.dtype)
    grad_gate_up = grouped_outer(grad_up, gathered, ends)
    grad_x = _combine(grouped_product(grad_up, gate_up, ends), None, rows, ends).to(x.dtype)
    return grad_x, grad_gate_up, grad_down, grad_weights


@_experts_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    tokens: Tensor,
    rows: Tensor,
    ends: Tensor,
    up: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        gate_up.new_empty(gate_up.shape),
        down.new_empty(down.shape),
        weights.new_empty(weights.shape),
    )


def _save(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:7], output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved: Saved = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue] set above
    grads = _experts_backward(grad.contiguous(), *saved)
    return (*grads, None, None, None, None)


_experts.register_autograd(_differentiate, setup_context=_save)


def _gated(up: Tensor) -> Tensor:
    """silu(gate) * up in fp32, rounded once: [M, 2F] to [M, F]."""
    gate, value = (up.float() if up.dtype != torch.float64 else up).chunk(2, dim=-1)
    return (F.silu(gate) * value).to(up.dtype)


def _combine(y: Tensor, weights: Tensor | None, rows: Tensor, ends: Tensor) -> Tensor:
    """sum_k weights[t, k] * y[rows[t, k]] in fp32 (fp64 for fp64); 0 for padding. [M, D] to [T, D]."""
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    is_real = rows[:, 0] < ends[-1]
    total = torch.zeros(len(rows), y.shape[1], dtype=wide, device=y.device)
    for choice in range(rows.shape[1]):
        part = y[rows[:, choice]].to(wide)
        total += part if weights is None else part * weights[:, choice, None]
    return total.masked_fill_(~is_real[:, None], 0)


def _of_choices(values: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """values[rows[t, k]], 0 for padding: [M] to [T, K]."""
    return values[rows].masked_fill(rows >= ends[-1], 0)
