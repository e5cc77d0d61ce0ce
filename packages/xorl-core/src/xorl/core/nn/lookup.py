"""Rows of a table by id, with gradients that are summed in fp32.

For a table in bf16, torch adds up an id's gradients in bf16 on CPUs. On GPUs it does so too, in groups of 32, if there
are at most 3,072 ids. In bf16, a sum of a few hundred equal gradients no longer grows.

Shapes: T ids, V rows, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

# For more ids, torch's kernel for GPUs sums in fp32, and needs less memory than `_sum_rows`.
MOST_SUMMED_IN_GROUPS = 3072


def look_up(ids: Tensor, table: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows of table [V, D] by ids [..], as [.., D]; the row of `padding_idx` gets no gradient. See F.embedding."""
    if table.dtype.itemsize >= 4 or (table.is_cuda and ids.numel() > MOST_SUMMED_IN_GROUPS):
        return F.embedding(ids, table, padding_idx)
    return _LookUp.apply(ids, table, padding_idx)


def _sum_rows(rows: Tensor, ids: Tensor, num_rows: int) -> Tensor:
    """For each id, the sum of its rows [T, D], as [V, D] in their dtype: added in fp32, rounded once; 0 for other ids.

    No table in fp32 is needed: the sum of an id is kept at one of its positions, which stands for the others.
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
        total = _sum_rows(grad.flatten(0, -2), ids.flatten(), ctx.num_rows)
        if ctx.padding_idx is not None:
            total[ctx.padding_idx] = 0
        return None, total, None
