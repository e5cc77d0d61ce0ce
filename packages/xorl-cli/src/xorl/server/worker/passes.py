"""Runs calls: deals their data to ranks, runs the micro-batches on an engine, and collects values and metrics.

Shapes: T tokens of a row, K targets at each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xorl.core.loss import (
    LossFn,
    LossOutput,
    all_reduce_metrics,
    combine_metrics,
    metrics_between,
    no_metrics,
    read_metrics,
)
from xorl.data import PackedBatch
from xorl.server.batching import Assignment, Example, Layout, assign, in_datum_order, rows_of
from xorl.server.collectives import all_or_none, gather_rows
from xorl.server.operations import LossResult
from xorl.server.worker.base import Base
from xorl.server.worker.calls import Call, result_of
from xorl.train.engine import OnOutput

Row = Sequence[tuple[str, PackedBatch]]
"""One micro-batch: (model, its tokens), one after the other."""


class RowEngine(Protocol):
    """Computes rows with the models that they name; passes are collective."""

    def gradients_kept(self, rows: Sequence[Row]) -> AbstractContextManager[None]:
        """Around `forward_backward` of these rows: if it fails, on all ranks, restore the earlier gradients."""
        ...

    def forward_backward(
        self,
        rows: Sequence[Row],
        loss_fn: LossFn,
        model_ids: Sequence[str],
        on_output: OnOutput,
        whole: AbstractContextManager[None],
    ) -> None:
        """Add the gradients of these models; `whole` surrounds the passes."""
        ...

    def forward(self, rows: Sequence[Row], loss_fn: LossFn, on_output: OnOutput) -> None:
        """The losses alone."""
        ...


Values = tuple[list[NDArray[np.float32]], list[NDArray[np.float32]] | None]


@dataclass(frozen=True)
class PassOutcome:
    """The result of one call. Metrics are the same on every rank; only rank 0 has the values per token in `result`."""

    metrics: Mapping[str, float]
    result: LossResult


@dataclass(frozen=True)
class PassRunner:
    """Runs calls that share a pass: those of one key, of different models.

    pad_to_multiple_of: of the tokens of a row, as in local training.
    """

    base: Base
    engine: RowEngine
    pad_to_multiple_of: int

    def run(self, calls: Sequence[Call]) -> list[PassOutcome]:
        """The outcome of each call. Collective; if it fails on any rank, no rank's gradients have changed."""
        config, mesh = self.base.config, self.base.mesh
        assert (mesh.dp_rank, mesh.dp_size) == (self.base.place.rank, self.base.place.world_size), "one axis alone"
        examples = [example for call in calls for example in call.examples]
        assignment = assign(
            [len(example.tokens) for example in examples],
            num_ranks=mesh.dp_size,
            bin_len=config.sample_packing_sequence_len,
            packs=config.enable_packing,
            owners=[example.owner for example in examples],
        )
        layout = Layout.of(examples, self.pad_to_multiple_of)
        model_ids = [call.model_id for call in calls]
        found: list[PassOutcome] = []

        @contextmanager
        def whole() -> Iterator[None]:
            # A rank that failed alone must not meet others in collectives that are not these.
            with all_or_none("the pass"):
                yield
            with all_or_none("reading what the pass gave"):
                is_flat = layout.num_targets == 0
                # Queued before the host waits for the metrics.
                own = outputs.values(is_flat=is_flat)
                metrics = self._metrics(outputs, model_ids)
                values = self._values(own, examples, assignment, is_flat=is_flat)
                found.extend(_outcomes(calls, metrics, values))

        loss_fn = partial(calls[0].loss, **self.base.head_options)
        with ExitStack() as kept:
            # It may fail here alone, where this rank's own data and adapters are; others must not begin the pass then.
            with all_or_none("preparing the pass"):
                rows = [
                    # Padding is nobody's; somebody has to compute it.
                    [(owner or model_ids[0], batch) for owner, batch in rows_of(examples, members, layout)]
                    for members in assignment.bins[mesh.dp_rank]
                ]
                if not calls[0].forward_only:
                    kept.enter_context(self.engine.gradients_kept(rows))
            outputs = _Outputs(rows)
            if calls[0].forward_only:
                with whole():
                    self.engine.forward(rows, loss_fn, outputs.take)
            else:
                self.engine.forward_backward(rows, loss_fn, model_ids, outputs.take, whole())
        return found

    def _metrics(self, outputs: _Outputs, model_ids: Sequence[str]) -> list[dict[str, float]]:
        """Of each call, over all ranks."""
        by_model = [outputs.metrics(model_id, self.base.device) for model_id in model_ids]
        stacked = {name: torch.stack([own[name] for own in by_model]) for name in by_model[0]}
        reduced = all_reduce_metrics(stacked, self.base.mesh.dp_group)
        table = torch.stack(list(reduced.values()), dim=1).cpu()
        return [read_metrics(dict(zip(reduced, row.unbind(), strict=True))) for row in table]

    def _values(
        self, own: Tensor, examples: Sequence[Example], assignment: Assignment, *, is_flat: bool
    ) -> Values | None:
        """(log-probabilities, losses) of each datum on rank 0; the losses of several targets are made of the former.

        own: what `_Outputs.values` gave on this rank.
        """
        sizes = [
            sum(len(examples[index].tokens) for index in assignment.order(rank)) for rank in range(len(assignment.bins))
        ]
        by_rank = gather_rows(own, sizes)
        if by_rank is None:
            return None
        if not is_flat:
            return in_datum_order(examples, assignment, by_rank, lambda one: one.targets.shape), None
        logprobs = in_datum_order(examples, assignment, [part[:, 0] for part in by_rank], _flat_shape)
        return logprobs, in_datum_order(examples, assignment, [part[:, 1] for part in by_rank], _flat_shape)


def _outcomes(calls: Sequence[Call], metrics: Sequence[dict[str, float]], values: Values | None) -> list[PassOutcome]:
    outcomes: list[PassOutcome] = []
    start = 0
    for call, own in zip(calls, metrics, strict=True):
        logprobs: Sequence[NDArray[np.float32]] = ()
        losses: Sequence[NDArray[np.float32]] | None = ()
        part = slice(start, start + len(call.examples))
        if values is not None:
            logprobs, losses = values[0][part], None if values[1] is None else values[1][part]
        outcomes.append(PassOutcome(own, result_of(call, logprobs, losses, own)))
        start = part.stop
    return outcomes


def _flat_shape(example: Example) -> tuple[int, ...]:
    return example.targets.shape


class _Outputs:
    """What the loss gave for the rows of this rank, on the device, until all are queued."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._logprobs: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._metrics: dict[str, list[Mapping[str, Tensor]]] = {}
        self._names: tuple[str, ...] = ()

    def take(self, index: int, output: LossOutput) -> None:
        """One row's, without what is of padding."""
        assert output.logprobs is not None, "a loss of the table"
        num_tokens = sum(batch.num_tokens for _, batch in self._rows[index])
        self._logprobs.append(output.logprobs[:num_tokens].float())
        self._losses.append(output.per_token[:num_tokens].float())
        self._names = tuple(output.metrics)
        start = 0
        for model_id, batch in self._rows[index]:
            stop = start + len(batch.input_ids)
            own = output.metrics if len(self._rows[index]) == 1 else metrics_between(output, start, stop)
            self._metrics.setdefault(model_id, []).append(own)
            start = stop

    def metrics(self, model_id: str, device: torch.device) -> dict[str, Tensor]:
        """Of a model's tokens on this rank, where it may have none."""
        parts = self._metrics.get(model_id)
        return combine_metrics(parts) if parts else no_metrics(self._names, device)

    def values(self, *, is_flat: bool) -> Tensor:
        """[tokens, 2], log-probability and loss, or with several targets log-probabilities [tokens, K]."""
        logprobs = torch.cat(self._logprobs)
        return torch.stack([logprobs, torch.cat(self._losses)], dim=1) if is_flat else logprobs
