"""Checks of what a user passes to the experts of a layer, as far as the host knows it.

Shapes: T tokens, K experts per token, D model width, F width of an expert, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xorl.kernels.arguments import check_at_least, check_one_device, is_readable
from xorl.kernels.experts.adapted import Factors
from xorl.kernels.experts.gates import SILU, Biases, Gate
from xorl.kernels.experts.plan import is_padding
from xorl.kernels.experts.quantized import ExpertsWeight, QuantizedExperts, shape_of


def check_experts(
    x: Tensor,
    gate_up: ExpertsWeight,
    down: ExpertsWeight,
    weights: Tensor,
    ids: Tensor,
    num_real: Tensor | None,
    num_rows: int | None,
    factors: Factors | None,
    biases: Biases | None = None,
    gate: Gate = SILU,
) -> None:
    """Raise ValueError for shapes, dtypes or devices that do not fit, and for values on the CPU that are out of range.

    Compiled code has been checked before.
    """
    if torch.compiler.is_compiling():
        return
    shapes = list(x.shape), shape_of(gate_up), shape_of(down)
    dtypes = {weight.dtype for weight in (x, gate_up, down) if isinstance(weight, Tensor)}
    if [len(shape) for shape in shapes] != [2, 3, 3] or len(dtypes) > 1 or not _fit(*shapes, gate.num_parts):
        raise ValueError(
            f"x must be [T, D], gate_up [E, {gate.num_parts}F, D] and down [E, D, F], in one dtype unless quantised; "
            f"got {', '.join(map(str, shapes))} in {', '.join(sorted(map(str, dtypes)))}"
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    if weights.dim() != 2 or len(weights) != len(x) or weights.dtype != wide:
        raise ValueError(f"weights must be [{len(x)}, K] in {wide}; got {list(weights.shape)} in {weights.dtype}")
    if ids.shape != weights.shape or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"ids must be {list(weights.shape)} in int64; got {list(ids.shape)} in {ids.dtype}")
    if num_real is not None:
        _check_num_real(num_real, len(x))
    check_at_least("num_rows", num_rows, 0, optional=True)
    # The other fields of quantised weights are checked where these are dequantised.
    held = {
        name: weight.weight.codes if isinstance(weight, QuantizedExperts) else weight
        for name, weight in (("gate_up", gate_up), ("down", down))
    }
    check_one_device(x=x, **held, weights=weights, ids=ids, num_real=num_real)
    if factors is not None:
        _check_factors(factors, x, shapes[2], gate.num_parts)
    if biases is not None:
        _check_biases(biases, x, shapes[1][:2], shapes[2][:2])
    if is_readable(ids) and ids.numel():
        _check_ids(ids, shapes[1][0], num_real, num_rows, factors)


def _check_biases(biases: Biases, x: Tensor, *sizes: list[int]) -> None:
    for name, bias, size in zip(Biases._fields, biases, sizes, strict=True):
        if list(bias.shape) != size or bias.dtype != x.dtype:
            raise ValueError(f"biases.{name} must be {size} in {x.dtype}; got {list(bias.shape)} in {bias.dtype}")
    check_one_device(x=x, **{f"biases.{name}": bias for name, bias in zip(Biases._fields, biases, strict=True)})


def _check_num_real(num_real: Tensor, num_tokens: int) -> None:
    if num_real.dim() or num_real.is_floating_point():
        raise ValueError(f"num_real must be a 0-d integer tensor; got {list(num_real.shape)} in {num_real.dtype}")
    if is_readable(num_real) and not 0 <= int(num_real) <= num_tokens:
        raise ValueError(f"num_real must be from 0 to the {num_tokens} tokens; got {int(num_real)}")


def _check_ids(
    ids: Tensor, num_experts: int, num_real: Tensor | None, num_rows: int | None, factors: Factors | None
) -> None:
    lowest, highest = (int(bound) for bound in ids.aminmax())
    # With slots, any larger id is a choice without an expert.
    if lowest < 0 or (factors is None and highest > num_experts):
        raise ValueError(
            f"ids must be in [0, {num_experts}), or {num_experts} for a choice without an expert; got {lowest} to "
            f"{highest}"
        )
    if num_rows is not None:
        has_expert = ids < num_experts * (1 if factors is None else factors.num_slots)
        if num_real is not None:
            has_expert = has_expert & ~is_padding(len(ids), num_real)[:, None]
        if int(has_expert.sum()) > num_rows:
            raise ValueError(
                f"num_rows must be at least {int(has_expert.sum())}, the choices with an expert; got {num_rows}"
            )


def _check_factors(factors: Factors, x: Tensor, down: list[int], num_parts: int) -> None:
    num_experts, width, inner = down
    check_at_least("factors.num_slots", factors.num_slots, 1)
    if not 0 < factors.kept <= 1:
        raise ValueError(f"factors.kept must be a probability above 0; got {factors.kept!r}")
    rank, down_rank = factors.up_a.shape[1], factors.down_a.shape[1]
    sizes = (rank, width), (num_parts * inner, rank), (down_rank, inner), (width, down_rank)
    most = num_experts * factors.num_slots
    named = dict(zip(Factors._fields, factors[:4], strict=False))
    for (name, factor), size in zip(named.items(), sizes, strict=True):
        if factor.shape[1:] != size or len(factor) not in (1, most) or factor.dtype != x.dtype:
            raise ValueError(
                f"factors.{name} must be [{most} or 1, {size[0]}, {size[1]}] in {x.dtype}; got {list(factor.shape)} in "
                f"{factor.dtype}"
            )
    if factors.x is not None and (factors.x.shape, factors.x.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"factors.x must be {list(x.shape)} in {x.dtype}; got {list(factors.x.shape)} in {factors.x.dtype}"
        )
    check_one_device(x=x, **{f"factors.{name}": factor for name, factor in named.items()}, **{"factors.x": factors.x})


def _fit(x: list[int], gate_up: list[int], down: list[int], num_parts: int) -> bool:
    num_experts, width, inner = down
    return x[1] == width and gate_up == [num_experts, num_parts * inner, width]
