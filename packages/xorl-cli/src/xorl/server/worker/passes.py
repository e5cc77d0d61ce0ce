"""Runs calls: distributes their data over ranks, runs the micro-batches on an engine, and gathers values and metrics.

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

from xorl.core.loss import LossFn, LossOutput, all_reduce_metrics, combine_metrics, read_metrics
from xorl.core.loss.metrics import empty_metrics, metrics_between
from xorl.core.mesh import Mesh
from xorl.data import PackedBatch
from xorl.server.batching import Assignment, Example, Layout, assign, build_row, in_datum_order
from xorl.server.collectives import all_or_none, gather_rows
from xorl.server.operations import LossResult
from xorl.server.worker.base import Base
from xorl.server.worker.calls import PassCall, result_of
from xorl.train.engine import OnOutput, StepLosses
from xorl.train.model import head_options_of
from xorl.train.rows import join_rows, sizes_in_part

Row = Sequence[tuple[str, PackedBatch]]
"""One micro-batch: the segments (model, its tokens) in order."""


class RowEngine(Protocol):
    """Computes rows with the models of their segments; passes are collective."""

    def gradients_kept(self, rows: Sequence[Row]) -> AbstractContextManager[None]:
        """A context for `forward_backward` of these rows; restores the gradients if it raises, then on all ranks."""
        ...

    def forward_backward(
        self,
        rows: Sequence[Row],
        loss_fn: LossFn,
        model_ids: Sequence[str],
        on_output: OnOutput,
        whole: AbstractContextManager[None],
    ) -> Mapping[str, StepLosses]:
        """Add the gradients of these models; returns the sums of each. All passes run within the context `whole`."""
        ...

    def forward(self, rows: Sequence[Row], loss_fn: LossFn, on_output: OnOutput) -> None:
        """Compute the losses without gradients."""
        ...


Values = tuple[list[NDArray[np.float32]], list[NDArray[np.float32]] | None]


@dataclass(frozen=True)
class PassRunner:
    """Runs calls that share a pass: they have the same key and different models.

    The ranks of `mesh.data` get different rows; those that share rows get the same. pad_to_multiple_of: for the tokens
    of a row, as in local training.
    """

    base: Base
    engine: RowEngine
    pad_to_multiple_of: int

    def run(self, calls: Sequence[PassCall]) -> tuple[list[LossResult], Mapping[str, StepLosses]]:
        """The result of each call and, by model, the sums of a pass with gradients.

        Collective; if it fails on any rank, no rank's gradients change. Metrics and sums are the same on every rank;
        only rank 0 has the values per token.
        """
        config, mesh = self.base.config, self.base.mesh
        examples = [example for call in calls for example in call.examples]
        assignment = assign(
            [len(example.tokens) for example in examples],
            num_ranks=mesh.data.size,
            bin_len=config.sample_packing_sequence_len,
            packs=config.enable_packing,
            owners=[example.owner for example in examples],
        )
        layout = Layout.of(examples, self.pad_to_multiple_of)
        model_ids = [call.model_id for call in calls]
        results: list[LossResult] = []

        @contextmanager
        def guarded() -> Iterator[None]:
            # If one rank fails, it must not enter the next collectives while the others are still in these.
            with all_or_none("the pass"):
                yield
            with all_or_none("reading the results of the pass"):
                is_flat = layout.num_targets == 0
                # Queue this on the device before the host waits for the metrics.
                local = outputs.values(is_flat=is_flat)
                metrics = self._metrics(outputs, model_ids)
                values = self._values(local, examples, assignment, is_flat=is_flat)
                results.extend(_results(calls, metrics, values))

        loss_fn = partial(calls[0].loss, **head_options_of(self.base.local.model, self.base.local.train))
        with ExitStack() as kept:
            # This may fail on one rank only, because data and adapters differ; the others must not start the pass then.
            with all_or_none("preparing the pass"):
                rows = [
                    # Padding has no owner; assign it to the first model.
                    [(owner or model_ids[0], batch) for owner, batch in build_row(examples, members, layout)]
                    for members in assignment.bins[mesh.data.rank]
                ]
                if not calls[0].forward_only:
                    kept.enter_context(self.engine.gradients_kept(rows))
            outputs = _Outputs(rows, mesh)
            losses: Mapping[str, StepLosses] = {}
            if calls[0].forward_only:
                with guarded():
                    self.engine.forward(rows, loss_fn, outputs.take)
            else:
                losses = self.engine.forward_backward(rows, loss_fn, model_ids, outputs.take, guarded())
        return results, losses

    def _metrics(self, outputs: _Outputs, model_ids: Sequence[str]) -> list[dict[str, float]]:
        """The metrics of each call, over all ranks."""
        by_model = [outputs.metrics(model_id, self.base.device) for model_id in model_ids]
        stacked = {name: torch.stack([metrics[name] for metrics in by_model]) for name in by_model[0]}
        reduced = all_reduce_metrics(stacked, self.base.mesh.loss.group)
        table = torch.stack(list(reduced.values()), dim=1).cpu()
        return [read_metrics(dict(zip(reduced, row.unbind(), strict=True))) for row in table]

    def _values(
        self, local: Tensor, examples: Sequence[Example], assignment: Assignment, *, is_flat: bool
    ) -> Values | None:
        """(log-probabilities, losses) of each datum on rank 0; None on others. No losses if there are several targets.

        local: `_Outputs.values` of this rank.
        """
        mesh = self.base.mesh
        # Ranks that share rows all have their values; the first of them sends these.
        sizes = [0] * self.base.runtime.world_size
        for data_rank, reader in enumerate(mesh.readers):
            sizes[reader] = sum(len(examples[index].tokens) for index in assignment.order(data_rank))
        gathered = gather_rows(local if mesh.context.rank == 0 else local[:0], sizes)
        if gathered is None:
            return None
        by_rank = [gathered[reader] for reader in mesh.readers]
        if not is_flat:
            return in_datum_order(examples, assignment, by_rank), None
        logprobs = in_datum_order(examples, assignment, [part[:, 0] for part in by_rank])
        return logprobs, in_datum_order(examples, assignment, [part[:, 1] for part in by_rank])


def _results(calls: Sequence[PassCall], metrics: Sequence[dict[str, float]], values: Values | None) -> list[LossResult]:
    results: list[LossResult] = []
    start = 0
    for call, call_metrics in zip(calls, metrics, strict=True):
        logprobs: Sequence[NDArray[np.float32]] = ()
        losses: Sequence[NDArray[np.float32]] | None = ()
        part = slice(start, start + len(call.examples))
        if values is not None:
            logprobs, losses = values[0][part], None if values[1] is None else values[1][part]
        results.append(result_of(call, logprobs, losses, call_metrics))
        start = part.stop
    return results


class _Outputs:
    """Collects the loss outputs of this rank's rows on the device, without waiting for it.

    If ranks share rows, the outputs are of this rank's parts of them.
    """

    def __init__(self, rows: Sequence[Row], mesh: Mesh) -> None:
        self._rows = rows
        self._mesh = mesh
        self._logprobs: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._metrics: dict[str, list[Mapping[str, Tensor]]] = {}
        self._names: tuple[str, ...] = ()

    def take(self, index: int, output: LossOutput) -> None:
        """Add the output of one row."""
        assert output.logprobs is not None, "all losses of `get_loss` return them"
        row = self._rows[index]
        self._logprobs.append(output.logprobs.float())
        self._losses.append(output.per_token.float())
        self._names = tuple(output.metrics)
        start = 0
        for (model_id, _), size in zip(row, sizes_in_part(_sizes(row), self._mesh), strict=True):
            stop = start + size
            if size:
                metrics = output.metrics if len(row) == 1 else metrics_between(output, start, stop)
                self._metrics.setdefault(model_id, []).append(metrics)
            start = stop

    def metrics(self, model_id: str, device: torch.device) -> dict[str, Tensor]:
        """The metrics of a model's tokens on this rank, which may have none."""
        parts = self._metrics.get(model_id)
        return combine_metrics(parts) if parts else empty_metrics(self._names, device)

    def values(self, *, is_flat: bool) -> Tensor:
        """[tokens, 2]: log-probability and loss; if not `is_flat`, log-probabilities of the K targets [tokens, K].

        Of whole rows without their padding, one after the other. Collective among ranks that share rows.
        """
        logprobs = torch.cat(self._logprobs)
        own = torch.stack([logprobs, torch.cat(self._losses)], dim=1) if is_flat else logprobs
        lengths = [sum(_sizes(row)) for row in self._rows]
        whole = join_rows(own, lengths, self._mesh).split(lengths)
        num_tokens = [sum(batch.num_tokens for _, batch in row) for row in self._rows]
        return torch.cat([values[:count] for values, count in zip(whole, num_tokens, strict=True)])


def _sizes(row: Row) -> list[int]:
    """The number of tokens of each segment, with padding."""
    return [len(batch.input_ids) for _, batch in row]
