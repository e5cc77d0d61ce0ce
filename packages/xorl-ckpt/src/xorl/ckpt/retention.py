"""Chooses the checkpoints of a run to keep when a new one is published."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from numbers import Integral

from xorl.ckpt.errors import is_count, require


@dataclass(frozen=True)
class Retention:
    """Keeps the `last` highest steps, those divisible by `every`, and the `best` ones; None keeps none of a kind.

    losses: returns the loss of each step that was evaluated; the best steps have the lowest. `best` needs it.
    """

    last: int
    every: int | None = None
    best: int | None = None
    losses: Callable[[], Mapping[int, float]] = dict

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            value = getattr(self, name)
            is_none = value is None and name != "last"
            require(name, value, is_none or is_count(value, 1), "an int of at least 1")
        require("losses", self.losses, callable(self.losses), "a function that returns the losses")
        has_losses = self.losses is not dict
        require("best", self.best, self.best is None or has_losses, "possible without `losses`")

    def kept(self, steps: Collection[int]) -> set[int]:
        """The steps to keep among those of existing checkpoints; raises CheckpointError for unusable losses."""
        kept = set(sorted(steps)[-self.last :])
        if self.every is not None:
            kept |= {step for step in steps if step % self.every == 0}
        if self.best is not None:
            found = self.losses()
            require("losses", found, isinstance(found, Mapping), "a function that returns a mapping of steps to losses")
            for step in found:
                require("losses", step, isinstance(step, Integral), "a step, which is an int")
            losses = {step: loss for step, loss in found.items() if step in steps and math.isfinite(loss)}
            kept |= set(sorted(losses, key=lambda step: (losses[step], -step))[: self.best])
        return kept
