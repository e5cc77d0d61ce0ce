"""Rows that ranks share: the part of one that this rank computes, and whole rows from their parts.

Shapes: T tokens of a row, P ranks that share it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from xorl.core.mesh import Mesh
from xorl.kernels.layout import RankGroup, SequenceLayout, ShardedLayout


def part_of(layout: SequenceLayout, mesh: Mesh) -> SequenceLayout:
    """The layout of this rank's part of a row; the row itself if ranks share none.

    Raises ValueError if the number of tokens is not a multiple of the number of ranks.
    """
    names = mesh.context.ranks.name, mesh.rows.ranks.name
    return part_among(layout, mesh.ring.ranks, mesh.ulysses.ranks, mesh.tp.ranks, names)


def part_among(
    layout: SequenceLayout, ring: RankGroup, ulysses: RankGroup, tp: RankGroup, names: tuple[str, str]
) -> SequenceLayout:
    """As `part_of`, by the groups of a mesh; names: of its process groups `context` and `rows`."""
    part = layout
    if ring.size * ulysses.size > 1:
        part = ShardedLayout(layout, ring, ulysses, names[0])
    if tp.size > 1:
        # Outside of attention, the ranks of a tensor group split the part further, as more Ulysses ranks would.
        inner = RankGroup(ulysses.rank * tp.size + tp.rank, ulysses.size * tp.size, names[1])
        part = part.with_rows(ShardedLayout(layout, ring, inner, names[1]))
    return part


def among_ranks(layout: SequenceLayout, mesh: Mesh) -> SequenceLayout:
    """The layout with the largest sizes of rows of a rank, which the hosts tell each other. Collective."""
    num_tokens, whole = layout.rows.num_tokens, layout.whole
    sizes = torch.tensor([num_tokens, -num_tokens, len(whole.lengths), whole.max_seqlen])
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=mesh.loss.group)
    most, minus_fewest, *largest = sizes.tolist()
    among = layout.rows.among(most, tuple(largest) if most == -minus_fewest else None)
    return among if layout.rows is layout else layout.with_rows(among)


def sizes_in_part(sizes: Sequence[int], mesh: Mesh) -> list[int]:
    """How many tokens of each segment of a row are in this rank's part. sizes: of the segments, which fill the row."""
    segment = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    own = part_of(SequenceLayout.from_lengths(sizes), mesh).local(segment)
    return torch.bincount(own, minlength=len(sizes)).tolist()


def join_rows(values: Tensor, sizes: Sequence[int], mesh: Mesh, *, between_matrices: bool = False) -> Tensor:
    """The values of whole rows, from those of this rank's parts of them. Collective among ranks that share rows.

    Args:
        values: [sum of T / P, ..], the parts of the rows one after the other.
        sizes: T of each row.
        between_matrices: whether they are of the tokens that this rank has between the matrices that ranks share, such
            as the routes of experts; False: of those that its losses have.

    Returns [sum of T, ..], the rows one after the other; the same on every rank that shares them. No gradient.
    """
    ranks = mesh.rows if between_matrices else mesh.context
    if ranks.size == 1:
        return values
    gathered = [torch.empty_like(values) for _ in range(ranks.size)]
    dist.all_gather(gathered, values.contiguous(), group=ranks.group)
    layouts = [part_of(SequenceLayout.from_lengths([size]), mesh) for size in sizes]
    layouts = [layout.rows for layout in layouts] if between_matrices else layouts
    by_rank = [own.split([layout.num_tokens for layout in layouts]) for own in gathered]
    return torch.cat([layout.join(parts) for layout, parts in zip(layouts, zip(*by_rank, strict=True), strict=True)])
