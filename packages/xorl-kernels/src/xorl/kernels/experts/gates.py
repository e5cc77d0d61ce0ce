"""Activations of experts between their matrices, and their biases.

Shapes: T tokens, K experts per token, D model width, F width of an expert, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xorl.kernels.experts.plan import is_padding


class Gate(NamedTuple):
    """The gated activation of an expert, g * sigmoid(alpha * g + cubic * g^3) * (u + offset), computed in fp32.

    g is the smaller one of the gate and `limit`, and u is the other half of the up product, kept within `limit` of 0.

    squares: not 0 for an expert without a gate, whose activation is relu(u)^2 of the whole up product; wherever shapes
        have 2F, these have F.
    """

    alpha: float = 1.0
    cubic: float = 0.0
    limit: float = math.inf
    offset: float = 0.0
    squares: float = 0.0

    @property
    def num_parts(self) -> int:
        """The matrices that the up product stacks."""
        return 1 if self.squares else 2


SILU = Gate()
# The tanh of GELU's approximation (arXiv:1606.08415) is a sigmoid of twice its argument.
GELU_TANH = Gate(alpha=math.sqrt(8 / math.pi), cubic=math.sqrt(8 / math.pi) * 0.044715)
RELU2 = Gate(squares=1.0)


class Biases(NamedTuple):
    """The biases of all experts, in the dtype of the input: gate_up [E, 2F], the gate's first, and down [E, D]."""

    gate_up: Tensor
    down: Tensor


def some(biases: Tensor) -> Tensor | None:
    """The biases that an operator was given: None if they are empty."""
    return biases if biases.numel() else None


def with_down_biases(
    out: Tensor, biases: Tensor, weights: Tensor, ids: Tensor, num_real: Tensor | None, num_slots: int
) -> Tensor:
    """out [T, D] plus sum_k weights[t, k] * biases[e], e = ids[t, k], as one product with the weights of all experts.

    Arguments as for `reference.experts`; the experts of a token are all different. biases: [E, D].
    """
    num_experts = len(biases)
    # The last column is of choices without an expert, of which there may be several.
    experts = (ids // num_slots).clamp(max=num_experts)
    by_expert = weights.new_zeros(len(ids), num_experts + 1).scatter(1, experts, weights)[:, :-1]  # [T, E]
    if num_real is not None:
        by_expert = by_expert.masked_fill(is_padding(len(ids), num_real)[:, None], 0)
    return torch.addmm(out, by_expert.to(out.dtype), biases)


def activate(up: Tensor, gate: Gate) -> Tensor:
    """The activation [M, F] of the up product [M, 2F], the gate first, in the dtype of the latter."""
    if gate.squares:
        return up.relu().square()
    values, others = limited(up, gate)
    return values * torch.sigmoid(exponent_of(values, gate)) * (others + gate.offset if gate.offset else others)


def limited(up: Tensor, gate: Gate) -> Sequence[Tensor]:
    """g and u [M, F] of the up product [M, 2F]."""
    values, others = up.chunk(2, dim=-1)
    if gate.limit < math.inf:
        return values.clamp(max=gate.limit), others.clamp(-gate.limit, gate.limit)
    return values, others


def exponent_of(values: Tensor, gate: Gate) -> Tensor:
    """What the sigmoid is taken of, for g."""
    exponent = values if gate.alpha == 1.0 else values * gate.alpha
    return exponent + values**3 * gate.cubic if gate.cubic else exponent
