"""Mixtures: how many documents of each dataset an epoch uses, and which. Pure functions of sizes, shares and seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xorl.data.errors import DataError
from xorl.data.shuffle import permutation

# An epoch's order is in memory, 8 bytes for each of these and as much again while it is shuffled.
_MOST_REPEATED = 2**30


@dataclass(frozen=True)
class Share:
    """A dataset's share of a mixture: `weight` (relative to the others) or `num_epochs`; neither means once."""

    weight: float | None = None
    num_epochs: float | None = None


def check_shares(shares: Sequence[Share], option: str) -> None:
    """Raises DataError for contradictory shares; `option` is the place of the entries in the configuration."""
    for index, share in enumerate(shares):
        if share.weight is not None and share.num_epochs is not None:
            raise DataError(f"{option}[{index}]: set weight or num_epochs, not both")
        for name, value in (("weight", share.weight), ("num_epochs", share.num_epochs)):
            if value is not None and not 0 < value < float("inf"):
                raise DataError(f"{option}[{index}].{name}: {value}, want a number above 0")
    weighted = [share.weight is not None for share in shares]
    if any(weighted) and not all(weighted):
        raise DataError(
            f"{option}[{weighted.index(False)}].weight: not set, while others have weights; weights are shares of all "
            "samples, so give every entry one"
        )


def check_repetitions(sizes: Sequence[int], shares: Sequence[Share], option: str, unit: str = "documents") -> None:
    """Raises DataError for repetitions that make an epoch so long that its order is too much for the memory."""
    for index, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        if share.num_epochs is not None and share.num_epochs > 1 and size * share.num_epochs > _MOST_REPEATED:
            raise DataError(
                f"{option}[{index}].num_epochs: {share.num_epochs:g} times its {size} {unit} make an epoch too long to "
                f"order in memory; want {max(1, _MOST_REPEATED // size)} or less. To train on all of it for longer, "
                "set train.num_train_epochs or train.max_steps"
            )


def num_drawn(sizes: Sequence[int], shares: Sequence[Share]) -> list[int]:
    """The number of documents that an epoch draws from each dataset.

    With weights, an epoch is as long as all documents together, `sum(sizes)`, divided in proportion (the largest
    remainders get the rest; each dataset gives at least one). With `num_epochs`, a dataset gives that many times its
    size, rounded.
    """
    if not all(share.weight is not None for share in shares):
        times = [1.0 if share.num_epochs is None else share.num_epochs for share in shares]
        return [max(1, round(size * factor)) for size, factor in zip(sizes, times, strict=True)]
    weights = np.array([share.weight for share in shares], dtype=np.float64)
    exact = weights / weights.sum() * sum(sizes)
    drawn = np.floor(exact).astype(np.int64)
    rest = int(sum(sizes) - drawn.sum())
    drawn[np.argsort(drawn - exact, kind="stable")[:rest]] += 1
    return np.maximum(drawn, 1).tolist()


def drawn_rows(size: int, num: int, *key: str | int) -> np.ndarray:
    """`num` row numbers of a dataset of `size` rows, int64: every row as often as fits, the rest drawn by `key`."""
    whole, rest = divmod(num, size)
    passes = np.tile(np.arange(size, dtype=np.int64), whole)
    return passes if not rest else np.concatenate([passes, np.sort(permutation(size, "drawn", *key)[:rest])])
