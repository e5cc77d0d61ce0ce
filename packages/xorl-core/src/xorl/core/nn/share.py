"""`Share`: what a rank's module holds of a parameter that several ranks hold together, or whose gradient they sum.

FSDP2 shards the module's tensor further; `pieces` says where this rank's part of that lies in the whole parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Protocol

from torch import Tensor, nn

from xorl.core.nn.roles import declared
from xorl.core.shards import Box, local, local_box

# The axis of the first and the last stage of a pipeline.
ENDS = "ends"


@dataclass(frozen=True)
class Share:
    """The rows and columns of a whole parameter that a module holds.

    Attributes:
        num_rows: of the whole parameter.
        rows: ranges [start, stop) of its rows, in the order in which the module holds them.
        divided_over: the axes of the mesh whose ranks hold the rest; see `Mesh.axis`.
        columns: the range [start, stop) of its columns that the module holds; None: all of them.
        num_columns: of the whole parameter, with `columns`.
        column_dim: the dim of the columns, which is not 1 for a parameter that stacks blocks of rows.
        copies: for each range of rows, how many neighbours along the axis hold it, each with other terms of its
            gradient, and this rank's index among them; empty: no range has copies.
        summed_over: the axes of the mesh whose ranks each compute some terms of the gradient of what this module holds;
            they hold the same, so the gradient must be summed over them.
    """

    num_rows: int
    rows: tuple[tuple[int, int], ...]
    divided_over: tuple[str, ...] = ()
    columns: tuple[int, int] | None = None
    num_columns: int = 0
    column_dim: int = 1
    copies: tuple[tuple[int, int], ...] = ()
    summed_over: tuple[str, ...] = ()

    def whole(self, held: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole parameter, of which the module holds a tensor of the shape `held`."""
        return self._with_columns([self.num_rows, *held[1:]], self.num_columns)

    def held(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of what the module holds of a whole parameter of the shape `whole`."""
        num_rows = sum(stop - start for start, stop in self.rows)
        start, stop = self.columns or (0, 0)
        return self._with_columns([num_rows, *whole[1:]], stop - start)

    def _with_columns(self, shape: list[int], num_columns: int) -> tuple[int, ...]:
        if self.columns is not None:
            shape[self.column_dim] = num_columns
        return tuple(shape)

    def boxes(self, held: Box) -> Iterator[Box]:
        """Where a block of the module's tensor lies in the whole parameter: a box for each range, in the order held."""
        first, last = held.offset[0], held.offset[0] + held.shape[0]
        offset = list(held.offset[1:])
        if self.columns is not None:
            offset[self.column_dim - 1] += self.columns[0]
        taken = 0
        for start, stop in self.rows:
            begin, end = max(first, taken), min(last, taken + stop - start)
            if begin < end:
                yield Box((start + begin - taken, *offset), (end - begin, *held.shape[1:]))
            taken += stop - start


def whole_counts(by_rank: Sequence[Share], counts: Sequence[int]) -> tuple[int, ...]:
    """The rows of each matrix that a whole parameter stacks, of which the first of its ranks holds `counts`.

    Each of several matrices is divided among the ranks in order, so that each rank holds one range of it.
    """
    first = by_rank[0]
    if len(counts) == 1:
        return (first.num_rows,)
    assert len(first.rows) == len(counts), f"{len(counts)} matrices in {len(first.rows)} ranges"
    starts = [start for start, _ in first.rows]
    return tuple(stop - start for start, stop in pairwise([*starts, first.num_rows]))


def pieces(tensor: Tensor, share: Share | None) -> list[tuple[Box, Tensor]]:
    """This rank's part of a module's tensor, by where it lies in the whole parameter.

    Args:
        tensor: of the module, which may be sharded by FSDP2.
        share: what the module holds of the parameter; None: all of it.

    Returns:
        The boxes and, sharing memory with the tensor, their values. These are the consecutive rows of the local tensor.
    """
    part, held = local(tensor), local_box(tensor)
    if share is None:
        return [(held, part)]
    boxes = list(share.boxes(held))
    starts = [0]
    for box in boxes:
        starts.append(starts[-1] + box.shape[0])
    return [(box, part[start:stop]) for box, (start, stop) in zip(boxes, pairwise(starts), strict=True)]


def copied_rows(tensor: Tensor, share: Share) -> list[tuple[range, int, int]]:
    """For each of the `pieces`, its rows of the local tensor, how many ranks hold it, and this rank's index among them.

    The ranks are neighbours along the axis that divides the parameter; the number is 1 for a piece without copies.
    """
    found: list[tuple[range, int, int]] = []
    taken = 0
    for box, part in pieces(tensor, share):
        held = zip_longest(share.rows, share.copies, fillvalue=(1, 0))
        [(number, index)] = [own for (start, stop), own in held if start <= box.offset[0] < stop]
        found.append((range(taken, taken + len(part)), number, index))
        taken += len(part)
    return found


class DeclaresShares(Protocol):
    """A module that may not hold its parameters as a whole. `shares` maps the names of these to what it holds."""

    @property
    def shares(self) -> Mapping[str, Share]: ...


def shares_of(model: nn.Module) -> dict[str, Share]:
    """The shares that the modules of `model` declare, by the name of the parameter."""
    return {
        f"{path}.{name}" if path else name: share
        for path, module in model.named_modules()
        if (declaring := declared(module, DeclaresShares)) is not None
        for name, share in declaring.shares.items()
    }
