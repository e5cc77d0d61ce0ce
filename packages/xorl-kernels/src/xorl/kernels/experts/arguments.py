"""Checks of what a user passes to the experts of a layer, as far as the host knows it.

Shapes: T tokens, K experts per token, D model width, F width of an expert, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xorl.kernels.arguments import is_readable
from xorl.kernels.experts.adapted import Factors
from xorl.kernels.experts.quantized import ExpertsWeight, shape_of


def check_experts(
    x: Tensor, gate_up: ExpertsWeight, down: ExpertsWeight, weights: Tensor, ids: Tensor, factors: Factors | None
) -> None:
    """Raise ValueError for shapes or dtypes that do not fit, and for ids on the CPU below 0 or too large.

    Compiled code has been checked before.
    """
    if torch.compiler.is_compiling():
        return
    shapes = list(x.shape), shape_of(gate_up), shape_of(down)
    dtypes = {weight.dtype for weight in (x, gate_up, down) if isinstance(weight, Tensor)}
    if [len(shape) for shape in shapes] != [2, 3, 3] or len(dtypes) > 1 or not _fit(*shapes):
        raise ValueError(
            f"x must be [T, D], gate_up [E, 2F, D] and down [E, D, F], in one dtype unless quantised; got "
            f"{', '.join(map(str, shapes))} in {', '.join(sorted(map(str, dtypes)))}"
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    if weights.dim() != 2 or len(weights) != len(x) or weights.dtype != wide:
        raise ValueError(f"weights must be [{len(x)}, K] in {wide}; got {list(weights.shape)} in {weights.dtype}")
    if ids.shape != weights.shape or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"ids must be {list(weights.shape)} in int64; got {list(ids.shape)} in {ids.dtype}")
    if is_readable(ids) and ids.numel():
        num_experts = shapes[1][0]
        lowest, highest = (int(bound) for bound in ids.aminmax())
        # With slots, any larger id is a choice without an expert.
        if lowest < 0 or (factors is None and highest > num_experts):
            raise ValueError(
                f"ids must be in [0, {num_experts}), or {num_experts} for a choice without an expert; got {lowest} to "
                f"{highest}"
            )


def _fit(x: list[int], gate_up: list[int], down: list[int]) -> bool:
    num_experts, width, inner = down
    return x[1] == width and gate_up == [num_experts, 2 * inner, width]
