"""Checks of what a user passes to the experts of a layer, as far as the host knows it.

Shapes: T tokens, K experts per token, D model width, F width of an expert, E experts, S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xorl.kernels.arguments import is_readable
from xorl.kernels.experts.adapted import Factors
from xorl.kernels.experts.quantized import ExpertsWeight, QuantizedExperts, num_experts_of


def check_experts(
    x: Tensor, gate_up: ExpertsWeight, down: ExpertsWeight, weights: Tensor, ids: Tensor, factors: Factors | None
) -> None:
    """Raise ValueError for shapes or dtypes that do not fit, and for ids on the CPU below 0 or too large.

    Compiled code has been checked before.
    """
    if torch.compiler.is_compiling():
        return
    if x.dim() != 2:
        raise ValueError(f"x must be [T, D]; got {list(x.shape)}")
    num_experts = num_experts_of(gate_up)
    for name, weight, sizes in (("gate_up", gate_up, "[E, 2F, D]"), ("down", down, "[E, D, F]")):
        if isinstance(weight, Tensor) and (weight.dim() != 3 or weight.dtype != x.dtype):
            raise ValueError(
                f"{name} must be {sizes} in the dtype of x, {x.dtype}; got {list(weight.shape)} in {weight.dtype}"
            )
    outputs, inner = _num_outputs(gate_up), down.shape[2] if isinstance(down, Tensor) else _num_outputs(gate_up) // 2
    found = (_num_outputs(down), num_experts_of(down), gate_up.shape[2] if isinstance(gate_up, Tensor) else x.shape[1])
    if outputs != 2 * inner or found != (x.shape[1], num_experts, x.shape[1]):
        raise ValueError(
            f"gate_up must be [E, 2F, D] and down [E, D, F] for x [T, D]; got {_describe(gate_up)}, {_describe(down)} "
            f"and x {list(x.shape)}"
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    if weights.dim() != 2 or len(weights) != len(x) or weights.dtype != wide:
        raise ValueError(f"weights must be [{len(x)}, K] in {wide}; got {list(weights.shape)} in {weights.dtype}")
    if ids.shape != weights.shape or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"ids must be {list(weights.shape)} in int64; got {list(ids.shape)} in {ids.dtype}")
    if is_readable(ids) and ids.numel():
        lowest, highest = (int(bound) for bound in ids.aminmax())
        # With slots, any larger id is a choice without an expert.
        if lowest < 0 or (factors is None and highest > num_experts):
            raise ValueError(
                f"ids must be in [0, {num_experts}), or {num_experts} for a choice without an expert; got {lowest} to "
                f"{highest}"
            )


def _num_outputs(weight: ExpertsWeight) -> int:
    """O."""
    return weight.num_rows // weight.num_experts if isinstance(weight, QuantizedExperts) else weight.shape[1]


def _describe(weight: ExpertsWeight) -> str:
    shape = [num_experts_of(weight), _num_outputs(weight)]
    return f"{shape} rows" if isinstance(weight, QuantizedExperts) else str(list(weight.shape))
