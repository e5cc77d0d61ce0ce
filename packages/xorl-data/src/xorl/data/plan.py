"""The plan: which bins each optimizer step trains on, and how a step's bins are split over ranks and micro-batches.

The order of bins depends only on (fingerprint, seed, epoch), so the step number is the complete position in the data,
for any number of ranks and workers. Splitting a step over ranks is a separate function, which does not affect its bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from xorl.data.arguments import check_at_least, check_fields, checked, convert_fields_
from xorl.data.documents import PreparedDocuments
from xorl.data.errors import DataError
from xorl.data.hashing import digest, permutation
from xorl.data.packing import Bins

# The cost of len^2 relative to the cost of a token. Per layer, causal attention takes 2 * D multiply-adds for each of
# the len^2 / 2 pairs, and the linear layers take about 12 * D^2 per token: 1 / (12 * D), here for D = 2048.
PAIR_COST = 1 / (12 * 2048)


@dataclass(frozen=True)
class DataPlan:
    """The global order of bins, cut into optimizer steps of `bins_per_step` bins.

    With `shuffle`, each epoch has a different order; otherwise all have the packed order. `drop_last` drops the
    incomplete step at the end of an epoch; otherwise that step is short. `max_steps` overrides `num_epochs`, also to
    train for longer.
    """

    num_bins: int
    bins_per_step: int
    fingerprint: str
    seed: int = 0
    num_epochs: int = 1
    max_steps: int | None = None
    drop_last: bool = True
    shuffle: bool = True

    def __post_init__(self) -> None:
        convert_fields_(self)
        check_fields(self)
        check_at_least(1, bins_per_step=self.bins_per_step, num_epochs=self.num_epochs, max_steps=self.max_steps)
        if self.num_bins < 1:
            raise DataError("there are no bins to train on")
        if self.drop_last and self.num_bins < self.bins_per_step:
            raise DataError(
                f"bins_per_step: one optimizer step takes {self.bins_per_step} bins, but the data fills only "
                f"{self.num_bins}, so drop_last=True leaves no step; lower it, lower bin_len, add data, or "
                "set drop_last=False"
            )

    @classmethod
    @checked
    def over(
        cls,
        documents: PreparedDocuments,
        bins: Bins,
        *,
        bins_per_step: int,
        seed: int = 0,
        num_epochs: int = 1,
        max_steps: int | None = None,
        drop_last: bool = True,
        shuffle: bool = True,
    ) -> DataPlan:
        """The plan over `bins` of `documents`, with a fingerprint of the content of every bin.

        Raises ValueError for bins of other documents.
        """
        check_bins(documents.lengths, bins)
        return cls(
            num_bins=len(bins),
            bins_per_step=bins_per_step,
            fingerprint=fingerprint_of(documents, bins),
            seed=seed,
            num_epochs=num_epochs,
            max_steps=max_steps,
            drop_last=drop_last,
            shuffle=shuffle,
        )

    @classmethod
    @checked
    def one_pass(cls, documents: PreparedDocuments, bins: Bins, *, bins_per_step: int) -> DataPlan:
        """A plan for evaluation: every bin once, in packed order; the last step may be short."""
        return cls.over(documents, bins, bins_per_step=bins_per_step, drop_last=False, shuffle=False)

    @property
    def steps_per_epoch(self) -> int:
        return self.num_bins // self.bins_per_step if self.drop_last else -(-self.num_bins // self.bins_per_step)

    @property
    def left_out_bins(self) -> int:
        """The number of bins that each epoch drops; with `shuffle`, different ones each time."""
        return max(0, self.num_bins - self.steps_per_epoch * self.bins_per_step)

    @property
    def num_steps(self) -> int:
        return self.num_epochs * self.steps_per_epoch if self.max_steps is None else self.max_steps

    @property
    def hash(self) -> str:
        """Identifies the order: plans with equal hashes have the same documents at every step that both have."""
        seed = self.seed if self.shuffle else 0
        return digest("plan", self.fingerprint, self.num_bins, self.bins_per_step, seed, self.drop_last, self.shuffle)

    def bins_of_step(self, step: int) -> np.ndarray:
        """The bins of optimizer step `step` (from 0) in global order, int64. The cost does not depend on the step."""
        if not 0 <= step < self.num_steps:
            raise ValueError(f"step: {step} is not from 0 to {self.num_steps - 1}")
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.bins_per_step
        stop = min(start + self.bins_per_step, self.num_bins)
        if not self.shuffle:
            return np.arange(start, stop)
        return _order_of_epoch(self.num_bins, self.fingerprint, self.seed, epoch)[start:stop]


@lru_cache(maxsize=2)
def _order_of_epoch(num_bins: int, fingerprint: str, seed: int, epoch: int) -> np.ndarray:
    order = permutation(num_bins, "epoch", fingerprint, seed, epoch)
    order.flags.writeable = False
    return order


class _Identified(Protocol):
    @property
    def fingerprint(self) -> str: ...


def fingerprint_of(documents: _Identified, bins: Bins) -> str:
    """Identifies the content of every bin."""
    return digest("bins", documents.fingerprint, bins.digest)


def check_bins(lengths: np.ndarray, bins: Bins) -> None:
    """Raise ValueError for bins of other documents than those of `lengths` [N], as far as their sizes tell."""
    num_tokens = int(lengths.sum())
    if (len(bins.indices), bins.num_tokens) != (len(lengths), num_tokens):
        raise ValueError(
            f"bins: they hold {len(bins.indices)} documents of {bins.num_tokens} tokens together, but documents has "
            f"{len(lengths)} of {num_tokens}; use pack(documents.lengths) of the same documents"
        )


def check_loading(
    dp_rank: int,
    dp_size: int,
    micro_batch_size: int,
    pad_to_multiple_of: int,
    num_workers: int,
    prefetch_factor: int | None,
) -> None:
    """Raise ValueError unless there is such a data-parallel rank and its micro-batches have a size."""
    check_at_least(1, micro_batch_size=micro_batch_size, pad_to_multiple_of=pad_to_multiple_of)
    check_at_least(0, num_workers=num_workers, prefetch_factor=prefetch_factor)
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank: {dp_rank} is not from 0 to dp_size - 1, which is {dp_size - 1}")


def check_start(start: int, num_steps: int) -> None:
    """Raise ValueError for a step that cannot be the first one."""
    if not 0 <= start <= num_steps:
        raise ValueError(f"start: {start} is not from 0 to {num_steps}, the number of steps")


def bin_costs(
    lengths: np.ndarray, bins: Bins, pair_cost: float = PAIR_COST, more: np.ndarray | None = None
) -> np.ndarray:
    """The training cost of each bin in tokens, [num_bins]: sum(len) + pair_cost * sum(len^2) over its documents.

    more: [N], what each document costs besides, such as the encoding of its images.
    """
    packed = lengths[bins.indices].astype(np.float64)
    costs = packed + pair_cost * packed**2 + (0.0 if more is None else more[bins.indices])
    return np.add.reduceat(costs, bins.offsets[:-1]) if len(bins) else np.empty(0)


def split_step(costs: Sequence[float] | np.ndarray, *, dp_size: int, micro_batch_size: int) -> np.ndarray:
    """Splits one step's bins: [dp_size, num_micro_batches, micro_batch_size] indices into `costs`, -1 for none.

    Bins of similar cost go to the same micro-batch index on all ranks, because ranks wait for each other after each
    micro-batch. The ranks take turns receiving the most expensive bin, which also balances their sums.
    """
    if min(dp_size, micro_batch_size) < 1:
        raise ValueError(f"dp_size and micro_batch_size must be at least 1, got {dp_size} and {micro_batch_size}")
    wide = np.asarray(costs, dtype=np.float64)
    if wide.ndim != 1 or not (wide >= 0).all():
        raise DataError(f"costs: {costs}, want a number of at least 0 for each bin")
    descending = np.argsort(-wide, kind="stable")
    num_micro_batches = -(-len(descending) // (dp_size * micro_batch_size))
    rounds = np.full((num_micro_batches * micro_batch_size, dp_size), -1, dtype=np.int64)
    rounds.reshape(-1)[: len(descending)] = descending
    # Reverses rounds by the Thue-Morse sequence, because plain alternation favours the same side in every pair.
    reversed_rounds = [index.bit_count() % 2 == 1 for index in range(len(rounds))]
    rounds[reversed_rounds] = rounds[reversed_rounds, ::-1]
    return np.ascontiguousarray(rounds.reshape(num_micro_batches, micro_batch_size, dp_size).transpose(2, 0, 1))


def rescale_accumulation(bins_per_step: int, *, micro_batch_size: int, dp_size: int) -> int:
    """The gradient_accumulation_steps that keep `bins_per_step` on `dp_size` ranks. DataError if there is none."""
    check_at_least(1, bins_per_step=bins_per_step, micro_batch_size=micro_batch_size, dp_size=dp_size)
    per_round = micro_batch_size * dp_size
    if bins_per_step % per_round == 0:
        return bins_per_step // per_round
    sizes = [n for n in range(1, bins_per_step + 1) if bins_per_step % (n * micro_batch_size) == 0]
    micro_sizes = [n for n in range(1, bins_per_step + 1) if bins_per_step % (n * dp_size) == 0]
    micro_batches = f"micro_batch_size {_join_sizes(micro_sizes)} on this size" if micro_sizes else ""
    ranks = f"dp_size {_join_sizes(sizes)} with micro_batch_size {micro_batch_size}" if sizes else ""
    raise DataError(
        f"{bins_per_step} bins per step are not a multiple of dp_size {dp_size} times micro_batch_size "
        f"{micro_batch_size} = {per_round}; use "
        + (" or ".join(filter(None, (ranks, micro_batches))) or "micro_batch_size 1 on a size that divides it")
    )


def _join_sizes(sizes: Sequence[int]) -> str:
    shown = sizes if len(sizes) <= 12 else [*sizes[:6], *sizes[-6:]]
    return ", ".join(map(str, shown))
