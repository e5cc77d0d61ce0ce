"""Packs the data of clients' calls into micro-batches for every data-parallel rank, and maps per-token values back.

Pure functions: every rank computes the same assignment from the same data and builds only its own rows. Rank 0 can
therefore tell which datum each rank's tokens belong to.

Shapes: n tokens of one datum, T tokens of a row (padding included), K targets for each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from xorl.data import PackedBatch
from xorl.data.batch import IGNORE, INPUT_IDS, LABELS, Column, pack_row, padding_batch
from xorl.data.packing import best_fit_decreasing
from xorl.data.plan import PAIR_COST, split_step

ValueT = TypeVar("ValueT", bound=np.generic)
Bin = tuple[int, ...]
"""The indices of the data in one micro-batch of one rank, in row order; an empty bin is a row of padding."""

# A missing weight means 1. No other input has a neutral value.
NEUTRAL: Mapping[str, float] = {"weights": 1.0}
# The argument of the model that receives recorded experts, and the value for tokens that choose themselves.
RECORDED, FREE = "recorded", -1


@dataclass(frozen=True)
class Example:
    """One datum in the form that a loss takes.

    Attributes:
        tokens: [n] int64.
        targets: [n] or [n, K] int64: the token that each token predicts (already shifted); IGNORE for no target.
        fields: other inputs of the loss, by name: [n] or [n, K] fp32.
        owner: the model that it belongs to. A row keeps the data of one owner together.
        routes: recorded experts, [n, layers with experts, experts per token] int16; -1 for tokens without a record.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    fields: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    owner: str = ""
    routes: NDArray[np.int16] | None = None

    @property
    def num_targets(self) -> int:
        """K."""
        return 1 if self.targets.ndim == 1 else self.targets.shape[1]


@dataclass(frozen=True)
class Assignment:
    """The data of each rank: `bins[rank][micro_batch]`; every rank has the same number of micro-batches."""

    bins: tuple[tuple[Bin, ...], ...]

    def order(self, rank: int) -> tuple[int, ...]:
        """The indices of a rank's data, in the order of its rows."""
        return tuple(index for members in self.bins[rank] for index in members)


def check_examples(examples: Sequence[Example], *, bin_len: int, vocab_size: int) -> None:
    """Raise ValueError, naming the datum's index, for data that cannot be computed."""
    wanted = {name for example in examples for name in example.fields} - NEUTRAL.keys()
    for index, example in enumerate(examples):
        num_tokens = len(example.tokens)
        if not 1 <= num_tokens <= bin_len:
            raise ValueError(
                f"datum {index} has {num_tokens} tokens, but must have from 1 to {bin_len} "
                "(sample_packing_sequence_len): shorten it, or raise that option of the service"
            )
        _check_ids(f"datum {index}: tokens", example.tokens, vocab_size)
        targets = example.targets
        if targets.ndim not in (1, 2) or len(targets) != num_tokens or not targets.size:
            raise ValueError(
                f"datum {index}: target_tokens has shape {list(targets.shape)}; it must be [{num_tokens}] or "
                f"[{num_tokens}, K]: the targets of each of the {num_tokens} tokens"
            )
        _check_ids(f"datum {index}: target_tokens", targets[targets != IGNORE], vocab_size)
        for name, values in example.fields.items():
            if values.shape != targets.shape:
                raise ValueError(
                    f"datum {index}: {name} has shape {list(values.shape)}, but target_tokens has "
                    f"{list(targets.shape)}: they must be the same"
                )
            if not np.isfinite(values).all():
                raise ValueError(f"datum {index}: {name} has values that are not finite")
        missing = wanted - example.fields.keys()
        if missing:
            raise ValueError(f"datum {index} has no {min(missing)}, but other data of the call do: add it")


def _check_ids(what: str, ids: NDArray[np.int64], vocab_size: int) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(f"{what} contains {int(outside[0])}, which is outside the vocabulary of {vocab_size} tokens")


def assign(
    lengths: Sequence[int], *, num_ranks: int, bin_len: int, packs: bool = True, owners: Sequence[str] = ()
) -> Assignment:
    """Assign data of `lengths`, each from 1 to bin_len tokens, to rows of at most bin_len tokens on `num_ranks` ranks.

    Every rank gets the same number of rows; some may be empty. Best-fit packing sets the number of rows. The data are
    then spread over the rows to balance the cost of rows that run at the same time, and the total cost of each rank.
    With packs=False, each row holds one datum. Within a row, data are ordered by owner (in the order of `owners`), then
    by index. The result depends only on the arguments.
    """
    assert num_ranks >= 1, num_ranks
    assert all(1 <= length <= bin_len for length in lengths), "check_examples has checked the lengths"
    sizes = np.asarray(lengths, dtype=np.int64)
    costs = sizes + PAIR_COST * sizes.astype(np.float64) ** 2
    if packs:
        tight = best_fit_decreasing(sizes, bin_len)
        num_bins = max(-(-len(tight) // num_ranks), 1) * num_ranks
        bins = _spread(sizes, costs, min(num_bins, len(sizes)), bin_len) or tight
    else:
        bins = [[index] for index in range(len(sizes))]
    rank_of_owner = {owner: rank for rank, owner in enumerate(dict.fromkeys(owners))}
    ordered = [
        tuple(sorted(members, key=lambda index: (rank_of_owner[owners[index]] if owners else 0, index)))
        for members in bins
    ]
    dealt = split_step([costs[list(members)].sum() for members in ordered], dp_size=num_ranks, micro_batch_size=1)
    if not dealt.shape[1]:
        return Assignment((((),),) * num_ranks)
    return Assignment(
        tuple(tuple(ordered[index] if index >= 0 else () for index in rows[:, 0].tolist()) for rows in dealt)
    )


def _spread(
    sizes: NDArray[np.int64], costs: NDArray[np.float64], num_bins: int, bin_len: int
) -> list[list[int]] | None:
    """Longest first, put each datum into the cheapest of `num_bins` bins with room; None if one does not fit."""
    room = np.full(num_bins, bin_len, dtype=np.int64)
    load = np.zeros(num_bins)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for index in np.argsort(-sizes, kind="stable").tolist():
        chosen = int(np.where(room >= sizes[index], load, np.inf).argmin())
        if room[chosen] < sizes[index]:
            return None
        bins[chosen].append(index)
        room[chosen] -= sizes[index]
        load[chosen] += costs[index]
    return bins


@dataclass(frozen=True)
class Layout:
    """The properties that all rows of a call share.

    Attributes:
        num_targets: the largest K of any datum; 0 if all targets are [n].
        columns: labels, the other inputs of the loss, and recorded experts if any datum has them. Every row has them.
        pad_to_multiple_of: the number of tokens of a row is padded to a multiple of this.
    """

    num_targets: int
    columns: Mapping[str, Column]
    pad_to_multiple_of: int

    @classmethod
    def of(cls, examples: Sequence[Example], pad_to_multiple_of: int) -> Layout:
        num_targets = max(example.num_targets for example in examples)
        is_flat = all(example.targets.ndim == 1 for example in examples)
        width = () if is_flat else (num_targets,)
        # If a datum has fewer targets than others, its last target columns stay IGNORE.
        columns = {LABELS: Column("loss", np.int64, width, IGNORE)}
        columns |= {name: Column(width=width) for name in sorted({name for each in examples for name in each.fields})}
        routes = next((example.routes.shape[1:] for example in examples if example.routes is not None), None)
        if routes is not None:
            columns[RECORDED] = Column("model", np.int16, routes, FREE)
        return cls(0 if is_flat else num_targets, columns, pad_to_multiple_of)


def build_row(examples: Sequence[Example], members: Bin, layout: Layout) -> list[tuple[str, PackedBatch]]:
    """One micro-batch as segments (owner, its tokens), with padding after the last; an empty bin is all padding."""
    if not members:
        return [("", padding_batch(layout.pad_to_multiple_of, layout.columns))]
    groups = [
        (owner, [_columns_of(examples[index], layout) for index in indices])
        for owner, indices in groupby(members, key=lambda index: examples[index].owner)
    ]
    num_padding = -sum(len(examples[index].tokens) for index in members) % layout.pad_to_multiple_of
    last = len(groups) - 1
    return [
        (owner, pack_row(data, layout.columns, num_padding if position == last else 0))
        for position, (owner, data) in enumerate(groups)
    ]


def _columns_of(example: Example, layout: Layout) -> dict[str, NDArray[Any]]:
    """The columns of one datum."""
    fields = {
        name: np.full(example.targets.shape, value, np.float32)
        for name, value in NEUTRAL.items()
        if name in layout.columns
    }
    columns = {INPUT_IDS: example.tokens, LABELS: example.targets, **fields, **example.fields}
    return columns if example.routes is None else {**columns, RECORDED: example.routes}


def in_datum_order(
    examples: Sequence[Example],
    assignment: Assignment,
    by_rank: Sequence[NDArray[np.float32]],
) -> list[NDArray[np.float32]]:
    """Return each datum's per-token values, in the order of the data and with the shapes of their targets.

    by_rank: for each rank, the values of its data's tokens (no padding) in row order: [tokens] or [tokens, K].
    """
    found = rows_in_datum_order(examples, assignment, by_rank)
    for index, (example, part) in enumerate(zip(examples, found, strict=True)):
        shape = example.targets.shape
        columns = part[:, : shape[1] if len(shape) == 2 else 1] if part.ndim == 2 else part
        found[index] = np.ascontiguousarray(columns).reshape(shape)
    return found


def rows_in_datum_order(
    examples: Sequence[Example], assignment: Assignment, by_rank: Sequence[NDArray[ValueT]]
) -> list[NDArray[ValueT]]:
    """Return each datum's rows [n, ..], in the order of the data.

    by_rank: for each rank, the rows of its data's tokens (no padding) in row order.
    """
    found: dict[int, NDArray[ValueT]] = {}
    for rank, values in enumerate(by_rank):
        start = 0
        for index in assignment.order(rank):
            stop = start + len(examples[index].tokens)
            found[index] = values[start:stop]
            start = stop
        assert start == len(values), "a rank returns one row for each token of its data"
    assert len(found) == len(examples), "each datum is on exactly one rank"
    return [found[index] for index in range(len(examples))]
