"""Steps whose loss or gradient is not finite: their updates are skipped on the device; here their cause is reported.

Bins are shuffled, so the number of a step alone does not identify the data.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from xorl.ckpt.ranks import all_gather_text, this_rank
from xorl.core.loss import LossFn, LossOutput
from xorl.core.runtime import rng_state, set_rng_state
from xorl.core.shards import local
from xorl.data import PackedBatch
from xorl.train.data import Loader
from xorl.train.engine import Engine, OnOutput
from xorl.train.observe.observer import DivergedError

logger = logging.getLogger(__name__)

# In output_dir: a line for each step that is not finite.
REPORT = "nonfinite.jsonl"
# A run that skips this many steps in a row will not recover.
MAX_SKIPPED_IN_A_ROW = 10
_MAX_SHOWN = 8


class NonFiniteSteps:
    """Keeps the last steps until they are reported, and decides what a step that is not finite does.

    Args:
        skips: log the step and continue; otherwise raise DivergedError.
        output_dir: for REPORT.
    """

    def __init__(self, engine: Engine, loader: Loader, loss_fn: LossFn, output_dir: Path, *, skips: bool) -> None:
        self._engine = engine
        self._loader = loader
        self._loss_fn = loss_fn
        self._path = output_dir / REPORT
        self._skips = skips
        # By step: its micro-batches on this rank, and their losses on the device. A step is reported one step late.
        self._steps: dict[int, tuple[Sequence[PackedBatch], list[Tensor]]] = {}
        self._skipped: list[int] = []

    def record_step(self, step: int, batches: Sequence[PackedBatch]) -> OnOutput:
        """The callback for the outputs of `step` (from 1). Keeps the previous step too."""
        losses: list[Tensor] = []
        self._steps = {number: kept for number, kept in self._steps.items() if number == step - 1}
        self._steps[step] = (batches, losses)

        def record(_: int, output: LossOutput) -> None:
            losses.append(output.sum.detach())

        return record

    def handle(self, step: int, reason: str) -> None:
        """Report a step, and stop or continue (see `Observer.on_nonfinite`). Collective.

        Raises DivergedError, also if too many steps in a row were skipped.
        """
        batches, losses = self._steps[step]
        bins = self._bad_bins(step, losses)
        parameters = self._bad_parameters(batches)
        cause = f"{_describe_bins(*bins)} {_describe_parameters(parameters, len(self._names()))}"
        if this_rank() == 0:
            record = {"step": step, "reason": reason, "bins": bins[0], "parameters": parameters}
            try:
                with self._path.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            except OSError as error:
                logger.warning("%s cannot be written: %s", self._path, error)
        self._skipped = [*self._skipped, step] if self._skipped[-1:] == [step - 1] else [step]
        if not self._skips:
            raise DivergedError(step, f"{reason}. The update was not applied, and this step is not saved. {cause}")
        if len(self._skipped) >= MAX_SKIPPED_IN_A_ROW:
            raise DivergedError(step, f"{reason}. {len(self._skipped)} steps in a row were skipped. {cause}")
        logger.warning("step=%d was skipped (train.on_nonfinite): %s. %s", step, reason, cause)

    def _bad_bins(self, step: int, losses: Sequence[Tensor]) -> tuple[list[int], int]:
        """The bins of a step whose loss is not finite, over all ranks, and the number of all its bins. Collective."""
        # In a pipeline, only the last stage has losses.
        local_bins = self._loader.bins_of_micro_batches(step - 1) if losses else []
        is_finite = [bool(torch.isfinite(loss)) for loss in losses]
        bad = [int(index) for bins, finite in zip(local_bins, is_finite, strict=True) if not finite for index in bins]
        # Ranks that read the same bins count them once.
        total = sum(map(len, local_bins)) if self._engine.model.mesh.is_reader else 0
        by_rank = [json.loads(text) for text in all_gather_text(json.dumps([bad, total]))]
        return sorted({number for bins, _ in by_rank for number in bins}), sum(num for _, num in by_rank)

    def _bad_parameters(self, batches: Sequence[PackedBatch]) -> list[str]:
        """The parameters whose gradient is not finite when the step is repeated, in the model's order. Collective.

        On a GPU, later updates may have been applied already. Random generators are restored.
        """
        engine, state = self._engine, rng_state(self._engine.device)
        engine.forward_backward(batches, self._loss_fn)
        bad = {
            name
            for name, parameter in engine.model.module.named_parameters()
            if parameter.grad is not None and not bool(torch.isfinite(local(parameter.grad)).all())
        }
        engine.zero_grad()
        engine.timer.take()
        set_rng_state(state, engine.device)
        found = {name for text in all_gather_text(json.dumps(sorted(bad))) for name in json.loads(text)}
        return [name for name in self._names() if name in found]

    def _names(self) -> list[str]:
        return self._engine.model.trained_names


def _describe_bins(numbers: Sequence[int], total: int) -> str:
    """The bins to look at, and what to do about them."""
    if not numbers:
        return f"The losses of all its {total} bins are finite, but the gradient is not: lower train.lr."
    if len(numbers) == total > 1:
        return f"None of its {total} bins has a finite loss: lower train.lr."
    shown = ", ".join(map(str, numbers[:_MAX_SHOWN])) + ", ..." * (len(numbers) > _MAX_SHOWN)
    return (
        f"The loss of {len(numbers)} of its {total} bins is not finite ({shown}): inspect them with `xorl data "
        f"inspect CONFIG --bin {numbers[0]}`, or lower train.lr."
    )


def _describe_parameters(names: Sequence[str], total: int) -> str:
    """The parameters to look at; the backward pass computes the last of them first."""
    if not names:
        return "When the step is repeated, all gradients are finite"
    return (
        f"The gradients of {len(names)} of {total} parameters are not finite; the backward pass begins with {names[-1]}"
    )
