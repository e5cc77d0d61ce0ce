"""Batching: the data of clients' calls to micro-batches of every data-parallel rank, and values per token back.

Pure functions: every rank computes the same assignment from the same data, makes its own rows, and rank 0 knows
which token of which rank belongs to which datum.

Shapes: n tokens of one datum, T tokens of a row (padding included), K targets at each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from xorl.data import IGNORE, PAIR_COST, PackedBatch, padding_batch, split_step
from xorl.data.packing import best_fit_decreasing

Bin = tuple[int, ...]
"""The data of one micro-batch of one rank, by their numbers, in the order of the row; none is a row of padding."""

# A weight that a client leaves out is 1; no other input has a value that could be guessed.
NEUTRAL: Mapping[str, float] = {"weights": 1.0}


@dataclass(frozen=True)
class Example:
    """One datum as a loss takes it.

    Attributes:
        tokens: [n] int64.
        targets: [n] or [n, K] int64: what each token predicts, so shifted already; IGNORE where nothing is asked.
        fields: what else the loss reads, by name: [n] or [n, K] fp32.
        owner: whose it is. The data of an owner are neighbours in a row.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    fields: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    owner: str = ""

    @property
    def num_targets(self) -> int:
        """K."""
        return 1 if self.targets.ndim == 1 else self.targets.shape[1]


@dataclass(frozen=True)
class Assignment:
    """Who computes what: `bins[rank][micro_batch]`, as many micro-batches on each rank."""

    bins: tuple[tuple[Bin, ...], ...]

    @property
    def num_micro_batches(self) -> int:
        return len(self.bins[0])

    def order(self, rank: int) -> tuple[int, ...]:
        """The data of a rank, one after the other as its rows have them."""
        return tuple(index for members in self.bins[rank] for index in members)


def check_examples(examples: Sequence[Example], *, bin_len: int, vocab_size: int) -> None:
    """Raise ValueError, with the number of the datum, for what cannot be computed."""
    wanted = {name for example in examples for name in example.fields} - NEUTRAL.keys()
    for index, example in enumerate(examples):
        num_tokens = len(example.tokens)
        if not 1 <= num_tokens <= bin_len:
            raise ValueError(
                f"datum {index} has {num_tokens} tokens; it must have at least 1 and at most "
                f"{bin_len} (sample_packing_sequence_len): cut it, or raise that option of the service"
            )
        _check_ids(f"datum {index}: tokens", example.tokens, vocab_size)
        targets = example.targets
        if targets.ndim not in (1, 2) or len(targets) != num_tokens or not targets.size:
            raise ValueError(
                f"datum {index}: target_tokens has shape {list(targets.shape)}; it must be [{num_tokens}] or "
                f"[{num_tokens}, K], for each of the {num_tokens} tokens what comes next"
            )
        _check_ids(f"datum {index}: target_tokens", targets[targets != IGNORE], vocab_size)
        for name, values in example.fields.items():
            if values.shape != targets.shape:
                raise ValueError(
                    f"datum {index}: {name} has shape {list(values.shape)}, and target_tokens {list(targets.shape)}: "
                    "they must be the same"
                )
            if not np.isfinite(values).all():
                raise ValueError(f"datum {index}: {name} has values that are not finite")
        missing = wanted - example.fields.keys()
        if missing:
            raise ValueError(f"datum {index} has no {min(missing)}, and others of the call have")


def _check_ids(what: str, ids: NDArray[np.int64], vocab_size: int) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(f"{what} has {int(outside[0])}, which is no token of a vocabulary of {vocab_size}")


def assign(
    lengths: Sequence[int], *, num_ranks: int, bin_len: int, packs: bool = True, owners: Sequence[str] = ()
) -> Assignment:
    """Deal data of `lengths`, each from 1 to bin_len tokens, to rows of at most bin_len tokens on `num_ranks` ranks.

    Every rank gets as many rows, of which some may be empty. There are as few as best fit makes of them, and the data
    are spread over them so that the rows that are computed at the same time, and all of a rank, cost about the same.
    Without `packs` each datum has a row of its own. Data of a row are in the order of `owners`, then of their numbers.
    A function of its arguments alone.
    """
    assert num_ranks >= 1, num_ranks
    assert all(1 <= length <= bin_len for length in lengths), "checked before"
    sizes = np.asarray(lengths, dtype=np.int64)
    costs = sizes + PAIR_COST * sizes.astype(np.float64) ** 2
    if packs:
        tight = best_fit_decreasing(sizes, bin_len)
        num_bins = max(-(-len(tight) // num_ranks), 1) * num_ranks
        bins = _spread(sizes, costs, min(num_bins, len(sizes)), bin_len) or tight
    else:
        bins = [[index] for index in range(len(sizes))]
    places = {owner: place for place, owner in enumerate(dict.fromkeys(owners))}
    ordered = [
        tuple(sorted(members, key=lambda index: (places[owners[index]] if owners else 0, index))) for members in bins
    ]
    dealt = split_step([costs[list(members)].sum() for members in ordered], dp_size=num_ranks, micro_batch_size=1)
    if not dealt.shape[1]:
        return Assignment((((),),) * num_ranks)
    return Assignment(
        tuple(tuple(ordered[place] if place >= 0 else () for place in rows[:, 0].tolist()) for rows in dealt)
    )


def _spread(
    sizes: NDArray[np.int64], costs: NDArray[np.float64], num_bins: int, bin_len: int
) -> list[list[int]] | None:
    """Longest first, each into the cheapest of `num_bins` bins that has room; None where one finds no room."""
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
    """What all rows of a call have in common.

    Attributes:
        num_targets: K, of the datum with most; 0 where all targets are [n].
        fields: the names of what the loss reads besides, in every row.
        pad_to_multiple_of: of a row's tokens.
    """

    num_targets: int
    fields: tuple[str, ...]
    pad_to_multiple_of: int

    @classmethod
    def of(cls, examples: Sequence[Example], pad_to_multiple_of: int) -> Layout:
        num_targets = max(example.num_targets for example in examples)
        is_flat = all(example.targets.ndim == 1 for example in examples)
        names = sorted({name for example in examples for name in example.fields})
        return cls(0 if is_flat else num_targets, tuple(names), pad_to_multiple_of)


def rows_of(examples: Sequence[Example], members: Bin, layout: Layout) -> list[tuple[str, PackedBatch]]:
    """One micro-batch: (owner, its tokens) along the row, padded once, at the end of the last; [] is all padding."""
    if not members:
        return [("", _padding(layout))]
    groups = [
        (owner, [examples[index] for index in own])
        for owner, own in groupby(members, key=lambda index: examples[index].owner)
    ]
    num_padding = -sum(len(examples[index].tokens) for index in members) % layout.pad_to_multiple_of
    last = len(groups) - 1
    return [
        (owner, _row(own, layout, num_padding if place == last else 0)) for place, (owner, own) in enumerate(groups)
    ]


def _padding(layout: Layout) -> PackedBatch:
    batch = padding_batch(layout.pad_to_multiple_of)
    shape = (len(batch.labels), layout.num_targets) if layout.num_targets else (len(batch.labels),)
    extras = {name: torch.zeros(shape, dtype=torch.float32) for name in layout.fields}
    return PackedBatch(
        input_ids=batch.input_ids,
        labels=torch.full(shape, IGNORE),
        positions=batch.positions,
        cu_seqlens=batch.cu_seqlens,
        lengths=batch.lengths,
        num_tokens=0,
        num_trained_tokens=0,
        extras=extras,
    )


def _row(examples: Sequence[Example], layout: Layout, num_padding: int) -> PackedBatch:
    """Data joined, with a document of padding at the end where there is any."""
    lengths = [len(example.tokens) for example in examples]
    total = sum(lengths) + num_padding
    all_lengths = np.array([*lengths, num_padding] if num_padding else lengths, dtype=np.int64)
    ends = np.cumsum(all_lengths)
    width = (layout.num_targets,) if layout.num_targets else ()
    input_ids = np.zeros(total, dtype=np.int64)
    labels = np.full((total, *width), IGNORE, dtype=np.int64)
    extras = {name: np.zeros((total, *width), dtype=np.float32) for name in layout.fields}
    for example, stop in zip(examples, ends.tolist(), strict=False):
        place = slice(stop - len(example.tokens), stop)
        input_ids[place] = example.tokens
        # A datum with fewer targets than others leaves the last ones unasked.
        targets = example.targets.reshape(len(example.tokens), -1) if width else example.targets
        inner = (place, slice(targets.shape[1])) if width else place
        labels[inner] = targets
        for name, values in extras.items():
            given = example.fields.get(name)
            values[inner] = NEUTRAL[name] if given is None else given.reshape(targets.shape)
    trained = labels != IGNORE
    if "weights" in extras:
        trained &= extras["weights"] != 0
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(np.arange(total, dtype=np.int64) - np.repeat(ends - all_lengths, all_lengths)),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
        lengths=tuple(all_lengths.tolist()),
        num_tokens=sum(lengths),
        num_trained_tokens=int(np.count_nonzero(trained.reshape(total, -1).any(axis=1))),
        extras={name: torch.from_numpy(values) for name, values in extras.items()},
    )


def in_datum_order(
    examples: Sequence[Example],
    assignment: Assignment,
    by_rank: Sequence[NDArray[np.float32]],
    shape_of: Callable[[Example], tuple[int, ...]],
) -> list[NDArray[np.float32]]:
    """Values per token back to their data.

    by_rank: of each rank, those of the tokens of its data (no padding) in the order of its rows: [tokens] or
    [tokens, K]. shape_of: what a datum's values have the shape of, [n] or [n, k] with k of at most K.
    """
    found: list[NDArray[np.float32] | None] = [None] * len(examples)
    for rank, values in enumerate(by_rank):
        start = 0
        for index in assignment.order(rank):
            shape = shape_of(examples[index])
            stop = start + shape[0]
            own = values[start:stop]
            if own.ndim == 2:
                own = own[:, : shape[1] if len(shape) == 2 else 1]
            found[index] = np.ascontiguousarray(own).reshape(shape)
            start = stop
        assert start == len(values), "a rank's tokens are those of its data"
    assert all(values is not None for values in found), "each datum is on one rank"
    return [values for values in found if values is not None]
