"""The arguments of the fused kernels and of their plain twins, and checks of them. Compiled code is checked before.

Shapes: T tokens, D model width, H query heads, G key/value heads, C channels of a head, F feed-forward width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from xorl.kernels.arguments import check_number, check_one_device

RopeTables = tuple[Tensor, Tensor]
"""Cosines and sines of each token's rotation angles, fp32 [T, C / 2] each."""


class HeadShape(NamedTuple):
    """H query heads and G key/value heads of C channels each."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def row_counts(self) -> tuple[int, int, int]:
        """Rows of the weights of the query, key and value projections, which are the widths of their outputs."""
        return (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )


class HeadNorms(NamedTuple):
    """The RMS norms of query and key heads: weights [C], epsilon, and what is added to the weights."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    offset: float = 0.0


def check_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> None:
    """Raise ValueError unless x [..., D] can be normalised with weight [D], after the addition of a residual."""
    if torch.compiler.is_compiling():
        return
    if not x.dim() or weight.shape != x.shape[-1:] or not (x.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"x must be [..., D] and weight [D], of floating point; got {_form(x)} and {_form(weight)}")
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(f"residual must be {_form(x)}, as x; got {_form(residual)}")
    check_number("eps", eps)
    check_one_device(x=x, residual=residual, weight=weight)


def check_rope(x: Tensor, tables: RopeTables, *, partial: bool = False) -> None:
    """Raise ValueError unless all channels of x [T, H, C], or the first ones, can be rotated by these angles."""
    if torch.compiler.is_compiling():
        return
    if x.dim() != 3 or x.shape[2] % 2 or not x.is_floating_point():
        raise ValueError(f"x must be [T, H, C] of floating point, with an even C; got {_form(x)}")
    shape = (x.shape[0], x.shape[2] // 2)
    if partial and tables[0].dim() == 2 and tables[0].shape[1] < shape[1]:
        shape = (x.shape[0], tables[0].shape[1])
    for table in tables:
        if table.shape != shape or table.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"rope must be two tables [T, C / 2], {list(shape)} in fp32; got {_form(table)}")
    check_one_device(x=x, cos=tables[0], sin=tables[1])


def check_heads(
    projected: tuple[Tensor, ...], shape: HeadShape, norms: HeadNorms | None, rope: RopeTables | None
) -> None:
    """Raise ValueError unless these fit each other as arguments of `reference.split_heads`."""
    if torch.compiler.is_compiling():
        return
    widths, first = shape.row_counts, projected[0]
    wanted = (sum(widths),) if len(projected) == 1 else widths
    if any(x.dim() != 2 for x in projected) or tuple(x.shape[1] for x in projected) != wanted:
        raise ValueError(
            f"projected must be one tensor [T, {sum(widths)}], or three with the widths {list(widths)}; got "
            f"{', '.join(map(_form, projected))}"
        )
    if any((x.shape[0], x.dtype, x.device) != (first.shape[0], first.dtype, first.device) for x in projected):
        raise ValueError(
            f"projected must be of the same tokens, in one dtype and on one device; got "
            f"{', '.join(f'{_form(x)} on {x.device}' for x in projected)}"
        )
    head = first[:, : shape.head_dim]  # [T, C]
    if norms is not None:
        check_norm(head, None, norms.q_weight, norms.eps)
        check_norm(head, None, norms.k_weight, norms.eps)
    if rope is not None:
        check_rope(head[:, None], rope)


def check_gate_up(gate_up: Tensor) -> None:
    """Raise ValueError unless gate_up is [..., 2F] of floating point."""
    if torch.compiler.is_compiling():
        return
    if not gate_up.dim() or gate_up.shape[-1] % 2 or not gate_up.is_floating_point():
        raise ValueError(f"gate_up must be [..., 2F] of floating point; got {_form(gate_up)}")


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} in {tensor.dtype}"
