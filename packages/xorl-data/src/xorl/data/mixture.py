"""Mixtures: how many documents, and which, an epoch draws from each dataset. Pure functions of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xorl.data.errors import DataError
from xorl.data.hashing import permutation

# The order of an epoch is kept in memory: 8 bytes per document, and twice that while it is shuffled.
_MAX_REPEATED = 2**30


@dataclass(frozen=True)
class Share:
    """A dataset's share of a mixture: a relative `weight`, or `num_epochs`. With neither, it is used once per epoch."""

    weight: float | None = None
    num_epochs: float | None = None


def check_shares(shares: Sequence[Share], option: str) -> None:
    """Raises DataError for conflicting shares; `option` is the path of the entries in the configuration."""
    for index, share in enumerate(shares):
        if share.weight is not None and share.num_epochs is not None:
            raise DataError(f"{option}[{index}]: set weight or num_epochs, not both")
        for name, value in (("weight", share.weight), ("num_epochs", share.num_epochs)):
            if value is not None and not 0 < value < float("inf"):
                raise DataError(f"{option}[{index}].{name}: {value}, want a number above 0")
    weighted = [share.weight is not None for share in shares]
    if any(weighted) and not all(weighted):
        raise DataError(
            f"{option}[{weighted.index(False)}].weight: not set, but other entries have weights; set a weight for "
            "every entry, or for none"
        )


def check_repetitions(sizes: Sequence[int], shares: Sequence[Share], option: str, unit: str = "documents") -> None:
    """Raises DataError if repetitions make an epoch too long for its order to be kept in memory."""
    for index, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        if share.num_epochs is not None and share.num_epochs > 1 and size * share.num_epochs > _MAX_REPEATED:
            raise DataError(
                f"{option}[{index}].num_epochs: with {share.num_epochs:g} times {size} {unit}, the order of an epoch "
                f"does not fit into memory; want {max(1, _MAX_REPEATED // size)} or less. To train for longer, set "
                "num_epochs or max_steps of the plan"
            )


def num_drawn(sizes: Sequence[int], shares: Sequence[Share]) -> list[int]:
    """The number of documents that an epoch draws from each dataset.

    With weights, an epoch has as many documents as all datasets together, `sum(sizes)`, divided in proportion to the
    weights (largest remainder method, at least one from each). With `num_epochs`, a dataset contributes its size times
    `num_epochs`, rounded.
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
    """Draws `num` rows of a dataset of `size` rows, int64: all equally often, and the remainder at random by `key`."""
    whole, rest = divmod(num, size)
    passes = np.tile(np.arange(size, dtype=np.int64), whole)
    return passes if not rest else np.concatenate([passes, np.sort(permutation(size, "drawn", *key)[:rest])])
