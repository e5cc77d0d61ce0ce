"""A layer of experts in plain torch: the twin that every implementation is tested against.

Shapes: T tokens, K experts per token, D model width, F width of an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    num_real: Tensor | None = None,
    *,
    num_rows: int | None = None,
    activation: Callable[[Tensor], Tensor] = F.silu,
    recompute: bool = False,
) -> Tensor:
    """sum_k weights[t, k] * down[e] @ (activation(gate[e] @ x[t]) * (up[e] @ x[t])), e = ids[t, k]; [T, D].

    One expert at a time, and the host waits for each: for tests, and for devices without grouped products.

    Args:
        x: [T, D].
        gate_up: [E, 2F, D], in the dtype of x; the rows of the gate come before those of up.
        down: [E, D, F], in the dtype of x.
        weights: [T, K] fp32 (fp64 for fp64). The sum over k is in this dtype and is rounded to that of x once.
        ids: [T, K] integers in [0, E]; E is a choice without an expert, which adds nothing.
        num_real: 0-d integer tensor; the output of tokens from this index on, which are padding, is 0.
        num_rows: how many choices have an expert; this form does not need it.
        activation: of the gate.
        recompute: compute everything again in the backward pass, and keep only the arguments.
    """
    if recompute:
        again = partial(experts, activation=activation)
        out = checkpoint(again, x, gate_up, down, weights, ids, num_real, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(out, Tensor)
        return out
    out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    is_real = torch.ones(len(x), dtype=torch.bool, device=x.device)
    if num_real is not None:
        is_real = torch.arange(len(x), device=x.device) < num_real
    for expert in range(len(gate_up)):
        tokens, choices = torch.where((ids == expert) & is_real[:, None])
        gate, up = F.linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
        y = F.linear(activation(gate) * up, down[expert])
        out = out.index_add(0, tokens, y.to(out.dtype) * weights[tokens, choices, None])
    return out.to(x.dtype)
