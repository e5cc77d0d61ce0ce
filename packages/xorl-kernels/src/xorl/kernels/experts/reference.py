"""A layer of experts in plain torch: the twin that every implementation is tested against.

Shapes: T tokens, K experts per token, D model width, F width of an expert, E experts.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from xorl.kernels.experts.adapted import Factors, is_shared
from xorl.kernels.experts.arguments import check_experts
from xorl.kernels.experts.gates import SILU, Biases, Gate, activate
from xorl.kernels.experts.quantized import ExpertsWeight, dense


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
) -> Tensor:
    """sum_k weights[t, k] * (down[e] @ activation(gate_up[e] @ x[t] + bias) + bias), e = ids[t, k]; [T, D].

    One expert at a time, and the host waits for each: for tests, and for devices without grouped products.

    Args:
        x: [T, D].
        gate_up: [E, 2F, D], in the dtype of x or quantised; the rows of the gate come before those of up.
        down: [E, D, F], as gate_up.
        weights: [T, K] fp32 (fp64 for fp64). The sum over k is in this dtype and is rounded to that of x once.
        ids: [T, K] int64 in [0, E]; E is a choice without an expert, which adds nothing. With slots, see `Factors`. On
            a GPU the values are not checked, since the host would wait: the result of others is undefined.
        num_real: 0-d integer tensor; the output of tokens from this index on, which are padding, is 0.
        num_rows, num_passes: how many choices have an expert, and in how many parts they are computed; this form needs
            neither.
        gate: the activation.
        biases: of the experts; None: there are none.
        recompute: compute everything again in the backward pass, and keep only the arguments.
        factors: of adapters.

    Raises ValueError for shapes, dtypes or devices that do not fit and, on a CPU, for ids out of range and too small a
    num_rows.
    """
    check_experts(x, gate_up, down, weights, ids, num_real, num_rows, factors, biases, gate)
    if recompute:
        again = partial(experts, gate=gate, biases=biases, factors=factors)
        out = checkpoint(
            again,
            x,
            gate_up,
            down,
            weights,
            ids,
            num_real,
            use_reentrant=False,
            preserve_rng_state=factors is not None and factors.kept < 1,
        )
        assert isinstance(out, Tensor)
        return out
    gate_up, down = dense(gate_up, x.dtype), dense(down, x.dtype)
    out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    is_real = torch.ones(len(x), dtype=torch.bool, device=x.device)
    if num_real is not None:
        is_real = torch.arange(len(x), device=x.device) < num_real
    num_slots = 1 if factors is None else factors.num_slots
    for expert in range(len(gate_up)):
        tokens, choices = torch.where((ids // num_slots == expert) & is_real[:, None])
        slots = ids[tokens, choices] % num_slots
        product = F.linear(x[tokens], gate_up[expert], None if biases is None else biases.gate_up[expert])
        if factors is not None:
            adapted = x if factors.x is None else factors.x
            product = product + _low_rank(adapted[tokens], slots, expert, factors, factors.up_a, factors.up_b)
        inner = activate(product, gate)
        y = F.linear(inner, down[expert], None if biases is None else biases.down[expert])
        if factors is not None:
            kept = F.dropout(inner, 1 - factors.kept, training=factors.kept < 1)
            y = y + _low_rank(kept, slots, expert, factors, factors.down_a, factors.down_b)
        out = out.index_add(0, tokens, y.to(out.dtype) * weights[tokens, choices, None])
    return out.to(x.dtype)


def _low_rank(rows: Tensor, slots: Tensor, expert: int, factors: Factors, a: Tensor, b: Tensor) -> Tensor:
    """What the adapters of an expert add to its product with rows [N, I], of which each has a slot [N]; [N, O]."""
    added = rows.new_zeros(len(rows), b.shape[1])
    for slot in range(factors.num_slots):
        index = expert * factors.num_slots + slot
        low = F.linear(rows, a[0 if is_shared(a) else index])
        added = torch.where((slots == slot)[:, None], F.linear(low, b[0 if is_shared(b) else index]), added)
    return added
