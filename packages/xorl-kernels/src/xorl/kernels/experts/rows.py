"""Computations of a layer of experts between its products, in plain torch; `rows_triton` has the same functions.

Everything is computed in fp32 (fp64 for fp64) and rounded once.

Shapes: T tokens, K experts per token, M rows (T * K, or fewer), D model width, F width of an expert, E experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from xorl.kernels.experts.gates import Gate, activate, exponent_of, limited


def gated(up: Tensor, ends: Tensor, gate: Gate, biases: Tensor | None) -> Tensor:
    """The activation of `up` plus the biases [E, 2F]: [M, 2F] to [M, F]. Rows from the last end on are undefined."""
    return activate(_biased(up, ends, biases), gate).to(up.dtype)


def gated_backward(
    grad: Tensor,
    up: Tensor,
    weights: Tensor,
    choices: Tensor,
    ends: Tensor,
    grad_weights: Tensor,
    gate: Gate,
    biases: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The backward pass of weight * gated(up). Rows from the last end on are padding.

    Args:
        grad: [M, F], without the routing weights; it may be overwritten.
        up: [M, 2F].
        weights: [T, K], in fp32 or fp64.
        choices: [M] int32, the index of each row's weight in the flattened weights.
        ends: [E] int32.
        grad_weights: [T, K], contiguous; gets the gradients of the weights of all `choices`, 0 for padding.
        gate, biases: as for `gated`.

    Returns:
        The gradient of `up` [M, 2F], and weight * gated(up) [M, F].
    """
    whole = _biased(up, ends, biases)
    if gate.squares:
        return _squared_backward(grad, whole, weights, choices, ends, grad_weights, up.dtype)
    values, others = limited(whole, gate)
    value = others + gate.offset if gate.offset else others
    weight, unweighted = weights.flatten()[choices, None], grad.to(weights.dtype)
    sigmoid = torch.sigmoid(exponent_of(values, gate))
    output = values * sigmoid * value
    _put_weights(grad_weights, (unweighted * output).sum(-1), choices, ends)
    weighted = unweighted * weight
    slope: Tensor | float = gate.alpha + 3 * gate.cubic * values.square() if gate.cubic else gate.alpha
    of_gate = weighted * value * sigmoid * (1 + values * (1 - sigmoid) * slope)
    grad_up = torch.cat([of_gate, weighted * values * sigmoid], dim=-1)
    if gate.limit < math.inf:
        first, second = whole.chunk(2, dim=-1)
        grad_up = grad_up.where(torch.cat([first <= gate.limit, second.abs() <= gate.limit], dim=-1), 0)
    return grad_up.to(up.dtype), (output * weight).to(up.dtype)


def _squared_backward(
    grad: Tensor,
    up: Tensor,
    weights: Tensor,
    choices: Tensor,
    ends: Tensor,
    grad_weights: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`gated_backward` of experts without a gate. up: [M, F], with biases."""
    weight, unweighted = weights.flatten()[choices, None], grad.to(weights.dtype)
    positive = up.relu()
    output = positive.square()
    _put_weights(grad_weights, (unweighted * output).sum(-1), choices, ends)
    return (unweighted * weight * 2 * positive).to(dtype), (output * weight).to(dtype)


def _put_weights(grad_weights: Tensor, values: Tensor, choices: Tensor, ends: Tensor) -> None:
    """Write the gradients [M] of the weights of choices, 0 for padding."""
    is_padding = torch.arange(len(choices), device=choices.device) >= ends[-1]
    grad_weights.view(-1)[choices.long()] = values.masked_fill_(is_padding, 0)


def combine(y: Tensor, weights: Tensor | None, rows: Tensor, ends: Tensor, out: Tensor | None = None) -> Tensor:
    """sum_k weights[t, k] * y[rows[t, k]] over the rows before the last end, in the order of k; in the dtype of y.

    Args:
        y: [M, D].
        weights: [T, K], in fp32 or fp64; None for ones.
        rows: [T, K] int32; negative ones and those from the last end on add nothing.
        ends: [E] int32.
        out: [T, D], contiguous, which the sum is added to, in place; None for zeros.

    Returns [T, D].
    """
    wide = _wide(y)
    shape = len(rows), y.shape[1]
    total = torch.zeros(shape, dtype=wide.dtype, device=y.device) if out is None else _wide(out.clone())
    for choice in range(rows.shape[1]):
        index = rows[:, choice]
        has_row = (index >= 0) & (index < ends[-1])
        part = wide[torch.where(has_row, index, 0)] if len(y) else torch.zeros_like(total)
        part = part if weights is None else part * weights[:, choice, None]
        total += part.masked_fill_(~has_row[:, None], 0)
    return total.to(y.dtype) if out is None else out.copy_(total)


def sum_parts(parts: Tensor) -> Tensor:
    """The sum over the first dimension, of the same dtype: [P, ..] to [..]."""
    return _wide(parts).sum(0).to(parts.dtype)


def _biased(up: Tensor, ends: Tensor, biases: Tensor | None) -> Tensor:
    """The rows [M, 2F] with the biases of their experts, in fp32 at least."""
    if biases is None:
        return _wide(up)
    rows = torch.arange(len(up), device=up.device, dtype=ends.dtype)
    experts = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
    return _wide(up) + _wide(biases)[experts]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
