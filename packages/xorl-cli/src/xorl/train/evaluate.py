"""Evaluation on held-out data: sums over the tokens of all ranks, divided once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from xorl.core.loss import LossFn, LossOutput, score_tokens
from xorl.core.mesh import Axis
from xorl.core.parallel import ParallelModel
from xorl.data import PackedBatch, StepLoader
from xorl.data.batch import trained_tokens
from xorl.train.engine import Engine
from xorl.train.observe.metrics_file import Metrics
from xorl.train.rows import join_rows


@dataclass(frozen=True)
class EvalPoints:
    """The steps after which a run evaluates: 0, every `eval_steps` (None: no others), and the last."""

    num_steps: int
    eval_steps: int | None

    def __call__(self, step: int) -> bool:
        """Whether to evaluate after `step` steps."""
        return step in (0, self.num_steps) or (self.eval_steps is not None and step % self.eval_steps == 0)


@dataclass(frozen=True)
class Scorer:
    """The part of an engine that an evaluation uses."""

    model: ParallelModel
    device: torch.device
    forward: Callable[[PackedBatch, LossFn], LossOutput | None]


@dataclass(frozen=True)
class Evaluation:
    """The held-out data of a run, or of a sweep's member, and when to score it.

    score: scores the whole data; it calls its argument as `evaluate` does. at_start: also before the first step of this
    process. write: records the scores.
    """

    score: Callable[[Callable[[], None]], dict[str, float]]
    due: EvalPoints
    at_start: bool
    write: Callable[[Metrics], None]


def evaluate(engine: Engine | Scorer, loader: StepLoader, check: Callable[[], None] | None = None) -> dict[str, float]:
    """Score the whole held-out set once. Collective.

    `check` is called before each batch, the same number of times on every rank; it may raise to end the evaluation.

    Returns eval_loss (nats, mean over trained tokens), eval_token_accuracy (fraction of trained tokens that are the
    model's first choice), eval_accuracy (fraction of documents whose trained tokens are all the model's first choice,
    so that greedy decoding would get them right) and eval_num_tokens. Both fractions are NaN if the loss is NaN, since
    NaN logits have no first choice.
    """
    sums = torch.zeros(5, dtype=torch.float64, device=engine.device)
    mesh = engine.model.mesh
    for _, batches in loader.steps():
        if check is not None:
            check()
        for batch in batches:
            output = engine.forward(batch, score_tokens)
            if output is None:  # the last stage has it
                continue
            correct = join_rows(output.metrics["correct"], [len(batch.input_ids)], mesh)
            sums += _sums(output.sum, correct, batch.to(engine.device), mesh.context)
    dist.all_reduce(sums, group=mesh.losses.group)
    loss, correct, trained, exact, documents = sums.tolist()
    if math.isnan(loss):
        correct = exact = math.nan
    return {
        "eval_loss": loss / trained,
        "eval_token_accuracy": correct / trained,
        "eval_accuracy": exact / documents,
        "eval_num_tokens": trained,
    }


def _sums(loss_sum: Tensor, correct: Tensor, batch: PackedBatch, context: Axis) -> Tensor:
    """The loss of this rank's tokens, and the counts of the whole row; only the first rank that shares it counts."""
    trained = trained_tokens(batch.labels, batch.targets)
    lengths = batch.cu_seqlens.diff().long()
    document = torch.repeat_interleave(torch.arange(len(batch.lengths), device=lengths.device), lengths)
    per_document = torch.zeros(len(batch.lengths), 2, device=lengths.device)
    per_document.index_add_(0, document, torch.stack([trained, trained & ~correct], dim=1).float())
    has_trained, all_correct = per_document[:, 0] > 0, per_document[:, 1] == 0
    counts = [correct.sum(), trained.sum(), (has_trained & all_correct).sum(), has_trained.sum()]
    is_counted = float(context.rank == 0)
    return torch.stack([loss_sum.double(), *(count.double() * is_counted for count in counts)])
