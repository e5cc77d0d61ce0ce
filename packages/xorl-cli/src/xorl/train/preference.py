"""Training on pairs of answers: the loss, the scores of the reference model, and the metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from xorl.config import Config
from xorl.core.loss import (
    PREFERENCE_LOSSES,
    PreferenceLoss,
    all_reduce_metrics,
    combine_metrics,
    read_metrics,
    score_answers,
)
from xorl.core.loss.metrics import NUM_TRAINED
from xorl.core.loss.preference import BASELINE
from xorl.core.models import Decoder
from xorl.data import PackedBatch, StepLoader
from xorl.data.pairs import CROSSED, REFERENCE, crossed
from xorl.lora import adapters_off
from xorl.train.data import padding_multiple
from xorl.train.engine import Engine
from xorl.train.rows import join_rows


def preference_loss(config: Config) -> PreferenceLoss | None:
    """The loss of pairs that the configuration names; None for cross-entropy."""
    train = config.train
    if train.loss == "cross_entropy":
        return None
    loss = PREFERENCE_LOSSES[train.loss]
    options = replace(
        loss.options,
        label_smoothing=train.preference_label_smoothing,
        length_normalized=train.dpo_length_normalized,
        gamma=train.simpo_gamma,
        desirable_weight=train.kto_desirable_weight,
        undesirable_weight=train.kto_undesirable_weight,
    )
    return replace(
        loss, options=options if train.preference_beta is None else replace(options, beta=train.preference_beta)
    )


@dataclass(frozen=True)
class Preference:
    """The parts of a run on pairs beside the engine.

    from_base: the reference model is the base, which scores each batch; otherwise batches have the columns of
        `xorl.data.pairs.ScoredPairs`.
    pad_to_multiple_of: of rows, as in the loader.
    """

    engine: Engine
    loss: PreferenceLoss
    from_base: bool
    pad_to_multiple_of: int

    @classmethod
    def of(cls, config: Config, engine: Engine) -> Preference | None:
        """None for cross-entropy. Raises ValueError if the base is the reference and trains itself."""
        loss = preference_loss(config)
        if loss is None:
            return None
        from_base = loss.needs_reference and config.train.preference_reference == "base"
        module = engine.model.module
        assert isinstance(module, Decoder), "runs on pairs train decoders"
        roles = module.parameter_roles()
        trained = [name for name, each in module.named_parameters() if each.requires_grad and roles[name] != "adapter"]
        if from_base and trained:
            raise ValueError(
                f"train.preference_reference: base is the model without its adapters, but {trained[0]} trains beside "
                "them; set it to initial"
            )
        return cls(engine, loss, from_base, padding_multiple(config))

    def prepare(self, batches: Sequence[PackedBatch], baseline: Tensor | None = None) -> Sequence[PackedBatch]:
        """Add what the loss needs to the columns of a step's batches. Collective.

        baseline: of `kto`; None computes it from these batches.
        """
        if self.loss.needs_baseline and baseline is None:
            baseline = self.baseline(batches)
        return [self._with_targets(batch, baseline) for batch in batches]

    @torch.no_grad()
    def baseline(self, batches: Iterable[PackedBatch]) -> Tensor:
        """The mean log-ratio of model and reference over answers to other prompts, at least 0. Collective."""
        engine, mesh = self.engine, self.engine.model.mesh
        sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
        is_counted = mesh.context.rank == 0 and mesh.pp.rank == 0
        for batch in batches:
            row = crossed(batch, self.pad_to_multiple_of)
            sums[0] += self._sum_of(row)
            if self.from_base:
                with adapters_off(engine.model.module):
                    sums[0] -= self._sum_of(row)
            elif is_counted and batch.num_pairs > 1:
                sums[0] -= batch.targets[CROSSED].to(engine.device).double().sum()
            sums[1] += len(row.document_lengths) * is_counted
        dist.all_reduce(sums, group=mesh.losses.group)
        return (sums[0] / sums[1].clamp(min=1)).clamp(min=0)

    def step_metrics(self, by_batch: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The metrics of a step, means over all pairs, from those of this rank's batches. Collective."""
        reduced = self._reduced(by_batch)
        num_pairs = reduced[NUM_TRAINED]
        means = {name.removesuffix(":mean"): value / num_pairs for name, value in reduced.items() if _is_mean(name)}
        return {"num_pairs": num_pairs, **means}

    def evaluate(self, loader: StepLoader, check: Callable[[], None] | None = None) -> dict[str, float]:
        """Score the whole held-out set once. Collective.

        Returns eval_loss and the metrics of the loss, means over pairs, under names that begin with eval_, and
        eval_num_pairs. The baseline of `kto` is that of the whole set. `check` is as for `evaluate.evaluate`.
        """

        def batches() -> Iterable[PackedBatch]:
            for _, step in loader.steps():
                if check is not None:
                    check()
                yield from step

        baseline = self.baseline(batches()) if self.loss.needs_baseline else None
        found = self.loss.empty_metrics(self.engine.device)
        for batch in batches():
            output = self.engine.forward(self._with_targets(batch, baseline), self.loss)
            if output is not None:  # the last stage has it
                found = combine_metrics([found, output.metrics])
        values = read_metrics(self._reduced([found]))
        means = {
            f"eval_{name.removesuffix(':mean')}": value for name, value in values.items() if name.endswith(":mean")
        }
        return {**means, "eval_num_pairs": values[NUM_TRAINED]}

    def _with_targets(self, batch: PackedBatch, baseline: Tensor | None) -> PackedBatch:
        targets = {name: values for name, values in batch.targets.items() if name != CROSSED}
        if self.from_base:
            with adapters_off(self.engine.model.module):
                targets[REFERENCE] = self.score(batch)
        if baseline is not None:
            targets[BASELINE] = baseline.expand(len(batch.input_ids))
        return replace(batch, targets=targets)

    def score(self, batch: PackedBatch) -> Tensor:
        """The log-probability of each label of a row, [T], 0 for others and before the last stage. Collective."""
        output = self.engine.forward(batch, score_answers)
        if output is None or output.logprobs is None:
            return torch.zeros(len(batch.input_ids), device=self.engine.device)
        return join_rows(output.logprobs, [len(batch.input_ids)], self.engine.model.mesh)

    def _sum_of(self, row: PackedBatch) -> Tensor | float:
        output = self.engine.forward(row, score_answers)
        return 0.0 if output is None else output.sum

    def _reduced(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        # Stages before the last have no outputs.
        own = combine_metrics([self.loss.empty_metrics(self.engine.device), *parts])
        return all_reduce_metrics(own, self.engine.model.mesh.losses.group)


def _is_mean(name: str) -> bool:
    return name.endswith(":mean") and name != "loss:mean"
