"""Experts by torch's grouped matrix products, with an explicit backward pass (the algorithm of SonicMoE, 2025).

The backward pass needs x, the up product and the routing weights; it recomputes the activation, and it takes the
gradient of the routing weights from the activation, so the down product is not kept. Rows are gathered and summed in a
fixed order, never added atomically: a repeated run computes the same bits. Between the products, one Triton kernel each
reads and writes every row once (`rows_triton`); without Triton, and in fp64, plain torch does (`rows`).

Shapes: T tokens, K experts per token, M = T * K rows, D model width, F width of an expert, E experts.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from xorl.kernels.experts import rows as plain
from xorl.kernels.experts.plan import RoutePlan
from xorl.kernels.fused import triton_refusal
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
    choices: Tensor,
    rows: Tensor,
    ends: Tensor,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    between = _between(x)
    tokens = choices // rows.shape[1]
    up = grouped_product(x[tokens], gate_up.transpose(1, 2), ends)  # [M, 2F]
    y = grouped_product(between.gated(up), down.transpose(1, 2), ends)  # [M, D]
    return between.combine(y, weights, rows, ends), up.new_empty(0) if recompute else up


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
) -> tuple[Tensor, Tensor]:
    up = x.new_empty(0) if recompute else x.new_empty(choices.shape[0], gate_up.shape[1])
    return torch.empty_like(x, memory_format=torch.contiguous_format), up


@torch.library.custom_op("xorl::experts_native_backward", mutates_args=())
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    between = _between(x)
    tokens = choices // rows.shape[1]
    gathered, grad_rows = x[tokens], grad[tokens]
    if not up.numel():
        up = grouped_product(gathered, gate_up.transpose(1, 2), ends)
    grad_gated = grouped_product(grad_rows, down, ends)  # [M, F], before the routing weight
    grad_up, weighted, grad_weights = between.gated_backward(grad_gated, up, weights, choices, ends)
    grad_down = grouped_outer(grad_rows, weighted, ends) if trains_experts else x.new_empty(0)
    grad_gate_up = grouped_outer(grad_up, gathered, ends) if trains_experts else x.new_empty(0)
    grad_x = between.combine(grouped_product(grad_up, gate_up, ends), None, rows, ends)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        gate_up.new_empty(gate_up.shape if trains_experts else 0),
        down.new_empty(down.shape if trains_experts else 0),
        weights.new_empty(weights.shape),
    )


def _save(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:7], output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved: Saved = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue] set above
    needs: tuple[bool, ...] = ctx.needs_input_grad  # pyright: ignore[reportAttributeAccessIssue]
    trains_experts = needs[1] or needs[2]
    grad_x, grad_gate_up, grad_down, grad_weights = _experts_backward(grad.contiguous(), *saved, trains_experts)
    grads = (grad_gate_up, grad_down) if trains_experts else (None, None)
    return grad_x, *grads, grad_weights, None, None, None, None


_experts.register_autograd(_differentiate, setup_context=_save)


def _between(x: Tensor) -> ModuleType:
    """The module that computes everything between the products: `rows_triton` where Triton runs, else `rows`."""
    if x.dtype == torch.float64 or triton_refusal(x.device.type) is not None:
        return plain
    from xorl.kernels.experts import rows_triton  # noqa: PLC0415 - needs Triton

    return rows_triton
