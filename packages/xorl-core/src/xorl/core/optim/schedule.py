"""The learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from xorl.kernels.arguments import check_at_least, check_choice, check_number

DecayStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up from `start` to `peak`, then decay to `minimum` by `style`, then constant at `minimum`.

    warmup_ratio and decay_ratio are fractions of `num_steps`. Both are measured from the first step, so the decay ends
    after step decay_ratio * num_steps. Each step uses the value at its start, as in the schedulers of torch and
    transformers: the first step of the decay uses `peak`, and the last one a value above `minimum`. So even with a
    `minimum` of 0, every step of the decay has an effect.

    Raises ValueError for values out of range, or if the warm-up would end after a decay.
    """

    num_steps: int
    peak: float
    minimum: float = 0.0
    start: float = 0.0
    warmup_ratio: float = 0.0
    decay_ratio: float = 1.0
    style: DecayStyle = "constant"

    def __post_init__(self) -> None:
        check_choice("style", self.style, DecayStyle)
        check_at_least("num_steps", self.num_steps, 1)
        for name in ("peak", "minimum", "start"):
            check_number(name, getattr(self, name))
        if self.minimum > self.peak and self.style != "constant":
            raise ValueError(f"minimum {self.minimum:g} is above peak {self.peak:g}: the rate would not decay")
        for name in ("warmup_ratio", "decay_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if self.style != "constant" and self.warmup_ratio > self.decay_ratio:
            raise ValueError(
                f"warmup_ratio {self.warmup_ratio:g} is above decay_ratio {self.decay_ratio:g}: the decay would end "
                "before the warm-up; lower warmup_ratio or raise decay_ratio"
            )

    def __call__(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 1; raises ValueError for a step below 1."""
        if not step >= 1:  # NaN too
            raise ValueError(f"step must be at least 1, since steps are counted from 1; got {step}")
        warmup_steps = round(self.num_steps * self.warmup_ratio)
        if step <= warmup_steps:
            return self.start + (self.peak - self.start) * step / warmup_steps
        if self.style == "constant":
            return self.peak
        decay_steps = round(self.num_steps * self.decay_ratio)
        progress = min(1.0, (step - 1 - warmup_steps) / max(1, decay_steps - warmup_steps))
        remaining = 1.0 - progress if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.minimum + (self.peak - self.minimum) * remaining

    def sample(self, count: int = 10) -> list[tuple[int, float]]:
        """`count` (step, learning rate) pairs, evenly spaced over the run, including the first and last step."""
        last = max(1, self.num_steps)
        steps = sorted({round(1 + (last - 1) * i / max(1, count - 1)) for i in range(count)})
        return [(step, self(step)) for step in steps]
