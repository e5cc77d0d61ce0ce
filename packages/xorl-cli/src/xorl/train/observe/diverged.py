"""Finds the bins that made a step diverge: bins are shuffled, so the step number alone does not identify the data."""

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

_MAX_SHOWN = 8


class BinLosses:
    """The losses of this rank's micro-batches, kept on the device for the steps that are not reported yet."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._losses: dict[int, list[Tensor]] = {}

    def record_step(self, step: int) -> OnOutput:
        """The callback for the outputs of `step` (from 1). Keeps the previous step, which is reported one step late."""
        losses: list[Tensor] = []
        self._losses = {step - 1: self._losses.get(step - 1, []), step: losses}

        def record(_: int, output: LossOutput) -> None:
            losses.append(output.sum.detach())

        return record

    @contextmanager
    def name_bins_on_error(self) -> Iterator[None]:
        """Adds the bins with a non-finite loss to a DivergedError, which all ranks must raise together."""
        try:
            yield
        except DivergedError as error:
            raise DivergedError(error.step, f"{error.reason}. {self._describe(error.step)}") from error

    def _describe(self, step: int) -> str:
        """The non-finite bins of a step over all ranks, and what to do about them. Collective."""
        local_bins = self._loader.bins_of_micro_batches(step - 1)
        is_finite = [bool(torch.isfinite(loss)) for loss in self._losses[step]]
        bad = [int(index) for bins, finite in zip(local_bins, is_finite, strict=True) if not finite for index in bins]
        by_rank = [json.loads(text) for text in all_gather_text(json.dumps([bad, sum(map(len, local_bins))]))]
        numbers = sorted({number for bins, _ in by_rank for number in bins})
        total = sum(num for _, num in by_rank)
        if not numbers:
            return f"The losses of all its {total} bins are finite, but the gradient is not: lower train.lr"
        if len(numbers) == total > 1:
            return f"None of its {total} bins has a finite loss: lower train.lr"
        shown = ", ".join(map(str, numbers[:_MAX_SHOWN])) + ", ..." * (len(numbers) > _MAX_SHOWN)
        return (
            f"The loss of {len(numbers)} of its {total} bins is not finite ({shown}): inspect them with `xorl data "
            f"inspect CONFIG --bin {numbers[0]}`, or lower train.lr"
        )
