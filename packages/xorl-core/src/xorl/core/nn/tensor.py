"""Tensor parallelism with sequence parallelism between the matrices (arXiv:1909.08053, arXiv:2205.05198).

Ranks share each matrix of a layer: the first of a block by its outputs, the last by its inputs. Around a block, each
rank has a part of the tokens, so norms, residuals and experts are computed once among them.

Shapes: T tokens, P ranks, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from xorl.core.nn.share import Share
from xorl.kernels.layout import RankGroup
from xorl.kernels.torch_private import all_gather, all_gather_autograd, all_reduce, reduce_scatter_autograd

AXIS = "tp"


class TensorRanks:
    """The ranks that share each matrix. With one rank, every method is the identity.

    Attributes:
        group: the ranks, with this rank's place among them.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    @property
    def size(self) -> int:
        """P."""
        return self.group.size

    def gather(self, x: Tensor) -> Tensor:
        """All tokens [T, D] from each rank's [T / P, D]; the gradient is summed over the ranks. Collective."""
        return x if self.size == 1 else all_gather_autograd(x, self.size, self.group.name)

    def scatter(self, x: Tensor) -> Tensor:
        """This rank's tokens [T / P, D] of the sum of each rank's terms [T, D]. Collective."""
        return x if self.size == 1 else reduce_scatter_autograd(x, self.size, self.group.name)

    def join_columns(self, x: Tensor, num_columns: int) -> Tensor:
        """[T, num_columns] from each rank's `range_of` the columns; the gradient is that of its own. Collective."""
        if self.size == 1:
            return x
        joined = _JoinColumns.apply(x, num_columns, self.group)
        assert isinstance(joined, Tensor)
        return joined

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the ranks' x, on all of them; so is its gradient. Collective."""
        if self.size == 1:
            return x
        summed = _Sum.apply(x, self.group.name)
        assert isinstance(summed, Tensor)
        return summed

    def local(self, values: Tensor) -> Tensor:
        """The values [T / P, ..] of this rank's tokens, from those of all tokens."""
        return values if self.size == 1 else values.chunk(self.size)[self.group.rank]

    def range_of(self, count: int, head: int = 0) -> tuple[int, int]:
        """This rank's range [start, stop) of `count` rows or columns; if P does not divide it, the last has fewer.

        head: if not 0, the rows of a head, of which a rank holds at least one: neighbours have the same, if they are
            more than the heads.
        """
        num_copies = self._num_copies(count, head)
        return _range_of(count, self.group.rank // num_copies, self.size // num_copies)

    def num_of(self, count: int, head: int = 0) -> int:
        """The size of `range_of`."""
        start, stop = self.range_of(count, head)
        return stop - start

    def rows_of(self, counts: Sequence[int], head: int = 0) -> Share | None:
        """What this rank holds of a matrix that stacks matrices of `counts` rows, of each of which it has its range."""
        if self.size == 1:
            return None
        ranges: list[tuple[int, int]] = []
        before = 0
        for count in counts:
            start, stop = self.range_of(count, head)
            ranges.append((before + start, before + stop))
            before += count
        numbers = [self._num_copies(count, head) for count in counts]
        copies = [(number, self.group.rank % number) for number in numbers]
        return Share(before, tuple(ranges), (AXIS,), copies=tuple(copies) if max(numbers) > 1 else ())

    def _num_copies(self, count: int, head: int) -> int:
        return max(1, self.size * head // count)

    def columns_of(self, num_rows: int, count: int) -> Share | None:
        """What this rank holds of a matrix of `count` columns, of which it has its range."""
        if self.size == 1:
            return None
        return Share(num_rows, ((0, num_rows),), (AXIS,), self.range_of(count), count)


def _range_of(count: int, rank: int, num_ranks: int) -> tuple[int, int]:
    size = -(-count // num_ranks)
    return min(rank * size, count), min((rank + 1) * size, count)


class _Sum(torch.autograd.Function):
    """Each rank computes something else from the sum, so gradients are summed, too."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name  # pyright: ignore[reportAttributeAccessIssue] read by backward
        return all_reduce(x, group_name)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_reduce(grad, ctx.group_name), None  # pyright: ignore[reportAttributeAccessIssue] set by forward


class _JoinColumns(torch.autograd.Function):
    """Every rank computes the same from the result, so no rank needs the others' gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, num_columns: int, group: RankGroup) -> Tensor:
        ctx.own = slice(*_range_of(num_columns, group.rank, group.size))  # pyright: ignore[reportAttributeAccessIssue]
        padded = F.pad(x, (0, -(-num_columns // group.size) - x.shape[1]))
        gathered = all_gather(padded, group.size, group.name).unflatten(0, (group.size, -1))  # [P, T, ceil(N / P)]
        return gathered.transpose(0, 1).flatten(1)[:, :num_columns]

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad[:, ctx.own], None, None  # pyright: ignore[reportAttributeAccessIssue]


ALONE = TensorRanks(RankGroup(0, 1, ""))
