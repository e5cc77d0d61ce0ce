"""Rows of a table by id, with gradients that are summed in fp32.

If the table is in bf16, torch adds the gradients of an id in bf16 on CPUs, and on GPUs for up to 3,072 ids, in groups
of 32. After a few hundred additions, a gradient is lost in the rounding of the sum.

Shapes: T ids, V rows, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

# From more ids on, torch's kernel for GPUs sums in fp32, and needs less memory than `sum_rows`.
MOST_SUMMED_IN_GROUPS = 3072


def look_up(ids: Tensor, table: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows of table [V, D] by ids [..], as [.., D]; the row of `padding_idx` gets no gradient. See F.embedding."""
    is_wide = table.dtype in (torch.float32, torch.float64)
    if is_wide or (table.is_cuda and ids.numel() > MOST_SUMMED_IN_GROUPS):
        return F.embedding(ids, table, padding_idx)
    return _LookUp.apply(ids, table, padding_idx)


def sum_rows(rows: Tensor, ids: Tensor, num_rows: int) -> Tensor:
    """[V, D]: for each id, the sum of its rows [T, D], added in fp32 and rounded once to their dtype; else 0.

    The sums need no table in fp32: one position of each id, whichever is written last, stands for all of them.
    """
    num_ids = len(ids)
    positions = torch.arange(num_ids, device=ids.device)
    stands_for = ids.new_empty(num_rows).scatter_(0, ids, positions)[ids]
    sums = torch.ops.aten.embedding_dense_backward(rows.float(), stands_for, num_ids, -1, False)
    total = rows.new_zeros(num_rows, rows.shape[1])
    total[ids] = sums.to(rows.dtype)[stands_for]  # the same value for each position of an id
    return total


class _Context(FunctionCtx):
    num_rows: int
    padding_idx: int | None
    saved_tensors: tuple[Tensor, ...]


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, ids: Tensor, table: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_rows, ctx.padding_idx = len(table), padding_idx
        return F.embedding(ids, table, padding_idx)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [grad], (ids,) = grads, ctx.saved_tensors
        total = sum_rows(grad.flatten(0, -2), ids.flatten(), ctx.num_rows)
        if ctx.padding_idx is not None:
            total[ctx.padding_idx] = 0
        return None, total, None
