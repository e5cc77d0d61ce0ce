"""Which bins made a step diverge. Their order is drawn, so that the number of a step tells nobody what to look at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from xorl.ckpt.ranks import all_gather_text
from xorl.core.loss import LossOutput
from xorl.train.data import Loader
from xorl.train.engine import OnOutput
from xorl.train.observe.observer import DivergedError

_MOST_SHOWN = 8


class LossesOfBins:
    """The losses of this rank's micro-batches in the steps that are not reported yet, on the device."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._losses: dict[int, list[Tensor]] = {}

    def of_step(self, step: int) -> OnOutput:
        """What takes the outputs of `step`, from 1. Those of the step before are kept: it may be reported only now."""
        losses: list[Tensor] = []
        self._losses = {step - 1: self._losses.get(step - 1, []), step: losses}

        def take(_: int, output: LossOutput) -> None:
            losses.append(output.sum.detach())

        return take

    @contextmanager
    def named(self) -> Iterator[None]:
        """While entered, a DivergedError, which every rank has to raise, gets the bins whose loss is not finite."""
        try:
            yield
        except DivergedError as error:
            raise DivergedError(error.step, f"{error.told}. {self._account(error.step)}") from error

    def _account(self, step: int) -> str:
        """Collective."""
        own = self._loader.bins_of_micro_batches(step - 1)
        is_finite = [bool(torch.isfinite(loss)) for loss in self._losses[step]]
        bad = [int(index) for bins, fine in zip(own, is_finite, strict=True) if not fine for index in bins]
        told = [json.loads(text) for text in all_gather_text(json.dumps([bad, sum(map(len, own))]))]
        numbers = sorted({number for bins, _ in told for number in bins})
        total = sum(num for _, num in told)
        if not numbers:
            return f"The loss of each of its {total} bins is finite, the gradient is not: lower train.lr"
        if len(numbers) == total > 1:
            return f"The loss of none of its {total} bins is finite: lower train.lr"
        shown = ", ".join(map(str, numbers[:_MOST_SHOWN])) + ", ..." * (len(numbers) > _MOST_SHOWN)
        return (
            f"The loss of {len(numbers)} of its {total} bins is not finite ({shown}): look at them with `xorl data "
            f"inspect CONFIG --bin {numbers[0]}`, or lower train.lr"
        )
