"""Values of whole documents, of which several ranks may have parts.

Shapes: T tokens of this rank, N documents of the row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from xorl.kernels.layout import SequenceLayout, ShardedLayout
from xorl.kernels.torch_private import all_reduce


def document_mean(values: Tensor, chosen: Tensor, layout: SequenceLayout) -> Tensor:
    """For each token, the mean of `values` over the `chosen` tokens of its document, [T]; differentiable.

    If no token of a document is chosen, the mean is 0. Collective, also in the backward pass, if ranks share the row.

    Args:
        values: [T].
        chosen: [T] bool.
        layout: of the T tokens. Sums over documents are fp64, so that the order of their tokens does not matter.
    """
    document = document_of(layout)
    terms = torch.stack([values.double().masked_fill(~chosen, 0.0), chosen.double()])
    totals, counts = document_sums(terms, layout).unbind()
    return (totals / counts.clamp(min=1.0)).index_select(0, document).to(values.dtype)


def document_of(layout: SequenceLayout) -> Tensor:
    """The number of each token's document within its row, [T]."""
    return layout.local((layout.whole.positions == 0).cumsum(0) - 1)


def document_sums(terms: Tensor, layout: SequenceLayout) -> Tensor:
    """The sums of `terms` [C, T] over the tokens of each document, [C, N] fp64; differentiable.

    The same on all ranks that share the row. Collective, also in the backward pass, if any do.
    """
    sums = terms.new_zeros(len(terms), len(layout.whole.lengths), dtype=torch.float64)
    sums = sums.index_add(1, document_of(layout), terms.double())
    if isinstance(layout, ShardedLayout):
        summed = _SumOverParts.apply(sums, layout.group_name)
        assert isinstance(summed, Tensor)
        sums = summed
    return sums


class _SumOverParts(torch.autograd.Function):
    """The sum over the ranks of a group. Its gradient is summed as well: each rank has the loss of its own tokens."""

    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name  # pyright: ignore[reportAttributeAccessIssue]
        return all_reduce(value, group_name)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_reduce(grad, ctx.group_name), None  # pyright: ignore[reportAttributeAccessIssue]
