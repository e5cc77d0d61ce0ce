"""Runs calls: distributes their data over ranks, runs the micro-batches on an engine, and gathers values and metrics.

Shapes: T tokens of a row, K targets at each token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from xorl.core.loss import LossFn, LossOutput, all_reduce_metrics, combine_metrics, read_metrics
from xorl.core.loss.metrics import empty_metrics, metrics_between
from xorl.core.mesh import Mesh
from xorl.core.models.router_losses import RouterLosses, RouterSums
from xorl.data import PackedBatch
from xorl.server.batching import Layout, assign, build_row, in_datum_order, rows_in_datum_order
from xorl.server.collectives import Sum, all_or_none, gather_rows
from xorl.server.datum import Array
from xorl.server.operations import LossResult
from xorl.server.worker.base import Base
from xorl.server.worker.calls import PassCall, result_of
from xorl.server.worker.routes import RoutedLayers
from xorl.train.engine import OnOutput, StepLosses
from xorl.train.rows import join_rows, sizes_in_part

Row = Sequence[tuple[str, PackedBatch]]
"""One micro-batch: the segments (model, its tokens) in order."""

# In a pipeline, so many rows for each stage are computed before other work: stages wait for each other in every block.
ROWS_PER_STAGE = 8


class RowEngine(Protocol):
    """Computes rows with the models of their segments; passes are collective."""

    def rows_per_block(self, *, forward_only: bool) -> int:
        """How many rows are computed together, without any other work of the ranks in between."""
        ...

    def gradients_kept(self, model_ids: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """A context for `forward_backward` of these models, which restores their gradients if its body raises.

        If the body raises, it must do so on all ranks. Yields the copies that the caller may move to host memory
        while other work runs; copies of whole models stay on the device.
        """
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


class Values(NamedTuple):
    """Values per token of all data of a pass. losses: None if there are several targets. routes: if recorded."""

    logprobs: Sequence[NDArray[np.float32]]
    losses: Sequence[NDArray[np.float32]] | None
    routes: Sequence[Array]


class Verdict(IntEnum):
    """A decision of rank 0 between two blocks of a pass; the other ranks always say CONTINUE."""

    CONTINUE = 0
    PAUSE = 1
    CANCEL = 2


class PassCancelled(Exception):
    """The pass was cancelled between two blocks. Gradients are as before it."""


def always_continue() -> Verdict:
    """Never pause or cancel."""
    return Verdict.CONTINUE


@dataclass(frozen=True)
class PassRunner:
    """Runs calls that share a pass: they have the same key and different models.

    The ranks of `mesh.data` get different rows; those that share rows get the same. pad_to_multiple_of: for the tokens
    of a row, as in local training. routed: of a mixture of experts.
    """

    base: Base
    engine: RowEngine
    pad_to_multiple_of: int
    routed: RoutedLayers | None

    def begin(self, calls: Sequence[PassCall]) -> Pass:
        """Returns a pass of which nothing has been computed; collective. If this fails on any rank, it fails on all."""
        return Pass(self, calls)


class Pass:
    """Calls that are computed block by block (`RowEngine.rows_per_block`); between blocks, ranks may do other work.

    The rows, their order and the values do not depend on where the pass pauses. Until the pass is finished, the
    gradients from before it are kept; they are restored if it fails or is cancelled. `results` and `routers` are
    complete once it is finished: metrics and sums are the same on every rank; only rank 0 has the values per token.
    """

    def __init__(self, runner: PassRunner, calls: Sequence[PassCall]) -> None:
        self._runner = runner
        self.calls = calls
        self.model_ids = [call.model_id for call in calls]
        self.results: list[LossResult] = []
        self.routers: dict[str, RouterSums] = {}
        self._num_done = 0
        self._kept = ExitStack()
        self._copies: dict[str, Tensor] = {}
        config, mesh = runner.base.config, runner.base.mesh
        self._examples = [example for call in calls for example in call.examples]
        self._assignment = assign(
            [len(example.tokens) for example in self._examples],
            num_ranks=mesh.data.size,
            bin_len=config.sample_packing_sequence_len,
            packs=config.enable_packing,
            owners=[example.owner for example in self._examples],
        )
        self._layout = Layout.of(self._examples, runner.pad_to_multiple_of)
        self._loss_fn = calls[0].loss
        try:
            # This may fail on one rank only, because data and adapters differ; the others must not start the pass then.
            with all_or_none("preparing the pass"):
                self._rows = [
                    # Padding has no owner; assign it to the first model.
                    [
                        (owner or self.model_ids[0], batch)
                        for owner, batch in build_row(self._examples, members, self._layout)
                    ]
                    for members in self._assignment.bins[mesh.data.rank]
                ]
                if not calls[0].forward_only:
                    self._copies = self._kept.enter_context(runner.engine.gradients_kept(self.model_ids))
        except BaseException:
            self.abandon()
            raise
        self._routers = runner.base.module.routers if any(call.returns_routes for call in calls) else None
        self._outputs = _Outputs(self._rows, mesh, self._routers, self._layout.num_targets)

    @property
    def done(self) -> float:
        """The share of the rows that have been computed."""
        return self._num_done / len(self._rows)

    def advance(self, verdict: Callable[[], Verdict] = always_continue) -> bool:
        """Compute blocks until the pass is finished, or rank 0 wants a pause; returns whether it is finished.

        Collective; after an error, or PassCancelled, on any rank, no rank's gradients have changed.
        """
        try:
            with nullcontext() if self._routers is None else self._routers.recording():
                while self._num_done < len(self._rows):
                    decision = self._compute_block(verdict)
                    if self._num_done == len(self._rows):
                        break
                    if decision == Verdict.CANCEL:
                        raise PassCancelled
                    if decision == Verdict.PAUSE:
                        # On the device, they would take memory from the passes in between.
                        self._copies.update({name: copy.cpu() for name, copy in self._copies.items()})
                        return False
        except BaseException:
            self._kept.__exit__(*sys.exc_info())
            raise
        self._kept.close()
        return True

    def abandon(self) -> None:
        """Forget the pass. Its models must be removed, unless nothing of it has been computed."""
        self._kept.close()

    def cancel(self) -> None:
        """Restore the gradients from before the pass, and forget it. Collective."""
        try:
            raise PassCancelled
        except PassCancelled:
            self._kept.__exit__(*sys.exc_info())

    def _compute_block(self, verdict: Callable[[], Verdict]) -> int:
        """Compute the next block; returns rank 0's verdict after it."""
        engine, forward_only = self._runner.engine, self.calls[0].forward_only
        first = self._num_done
        size = engine.rows_per_block(forward_only=forward_only)
        if (num_stages := self._runner.base.mesh.dims.pp) > 1:
            size = max(size, ROWS_PER_STAGE * num_stages)
        block = self._rows[first : first + size]
        is_last = first + len(block) == len(self._rows)
        decision = Sum()

        @contextmanager
        def guarded() -> Iterator[None]:
            # A rank that fails must not enter the next collectives while the others are still in these.
            with all_or_none("the pass") as agreed:
                yield
                agreed.number += 0 if is_last else verdict()
            decision.number = agreed.number
            if is_last:
                with all_or_none("reading the results of the pass"):
                    self._read_results()

        def take(index: int, output: LossOutput) -> None:
            self._outputs.take(first + index, output)
            self._runner.base.position.move()

        if forward_only:
            with guarded():
                engine.forward(block, self._loss_fn, take)
        else:
            losses = engine.forward_backward(block, self._loss_fn, self.model_ids, take, guarded())
            for model_id, found in losses.items():
                if found.routers is not None:
                    earlier = self.routers.get(model_id)
                    self.routers[model_id] = found.routers if earlier is None else earlier + found.routers
        self._num_done += len(block)
        return decision.number

    def _read_results(self) -> None:
        is_flat = self._layout.num_targets == 0
        # Queue this on the device before the host waits for the metrics.
        local = self._outputs.values(is_flat=is_flat)
        metrics = self._metrics()
        values = self._values(local, self._outputs.routes(), is_flat=is_flat)
        self.results = _results(self.calls, metrics, values)

    def _metrics(self) -> list[dict[str, float]]:
        """The metrics of each call, over all ranks."""
        pp = self._runner.base.mesh.pp
        found = [self._metrics_of_stage() if pp.rank == 0 else []]
        if pp.size > 1:
            dist.broadcast_object_list(found, group=pp.group, group_src=0)
        return found[0]

    def _metrics_of_stage(self) -> list[dict[str, float]]:
        base = self._runner.base
        by_model = [self._outputs.metrics(model_id, base.device) for model_id in self.model_ids]
        stacked = {name: torch.stack([metrics[name] for metrics in by_model]) for name in by_model[0]}
        reduced = all_reduce_metrics(stacked, base.mesh.loss.group)
        table = torch.stack(list(reduced.values()), dim=1).cpu()
        return [read_metrics(dict(zip(reduced, row.unbind(), strict=True))) for row in table]

    def _values(self, local: Tensor, routes: Tensor | None, *, is_flat: bool) -> Values | None:
        """The values of each datum on rank 0; None on others.

        local, routes: `_Outputs.values` and `_Outputs.routes` of this rank.
        """
        examples, assignment, routed = self._examples, self._assignment, self._runner.routed
        gathered = self._gather(local)
        routes_of = [] if routes is None else self._gather(routes)
        if gathered is None or routes_of is None:
            return None
        found: list[Array] = []
        if routes_of:
            assert routed is not None
            by_datum = rows_in_datum_order(examples, assignment, routes_of)
            found = [routed.of_all_layers(one, np.int32) for one in by_datum]
        if not is_flat:
            return Values(in_datum_order(examples, assignment, gathered), None, found)
        logprobs = in_datum_order(examples, assignment, [part[:, 0] for part in gathered])
        return Values(logprobs, in_datum_order(examples, assignment, [part[:, 1] for part in gathered]), found)

    def _gather(self, local: Tensor) -> list[NDArray[Any]] | None:
        """Rows of tokens by data rank on rank 0; None on others."""
        mesh = self._runner.base.mesh
        # Ranks that share rows all have their values; the first of them sends these.
        sizes = [0] * self._runner.base.runtime.world_size
        for data_rank, reader in enumerate(mesh.readers):
            sizes[reader] = sum(len(self._examples[index].tokens) for index in self._assignment.order(data_rank))
        gathered = gather_rows(local if mesh.is_reader else local[:0], sizes)
        return None if gathered is None else [gathered[reader].numpy() for reader in mesh.readers]


def _results(calls: Sequence[PassCall], metrics: Sequence[dict[str, float]], values: Values | None) -> list[LossResult]:
    results: list[LossResult] = []
    start = 0
    for call, call_metrics in zip(calls, metrics, strict=True):
        part = slice(start, start + len(call.examples))
        of_call = Values((), (), ())
        if values is not None:
            losses = None if values.losses is None else values.losses[part]
            of_call = Values(values.logprobs[part], losses, values.routes[part])
        results.append(result_of(call, *of_call, call_metrics))
        start = part.stop
    return results


class _Outputs:
    """Collects the loss outputs of this rank's rows on the device, without waiting for it.

    If ranks share rows, the outputs are of this rank's parts of them. In a pipeline, only the last stage has outputs.
    routers: of passes whose routes are recorded. num_targets: of a token; 0 if each has one label.
    """

    def __init__(self, rows: Sequence[Row], mesh: Mesh, routers: RouterLosses | None, num_targets: int) -> None:
        self._rows = rows
        self._mesh = mesh
        self._routers = routers
        self._num_targets = num_targets
        self._routes: list[Tensor] = []
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
        if self._routers is not None:
            self._routes.append(self._routers.take_routes().int())
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
        if self._mesh.pp.rank:
            return torch.zeros(0, 2 if is_flat else self._num_targets, device=self._mesh.device_type)
        logprobs = torch.cat(self._logprobs)
        return self._whole(torch.stack([logprobs, torch.cat(self._losses)], dim=1) if is_flat else logprobs)

    def routes(self) -> Tensor | None:
        """[tokens, layers with experts, K] int32, like `values`; None if they are not recorded."""
        return None if self._routers is None else self._whole(torch.cat(self._routes), between_matrices=True)

    def _whole(self, own: Tensor, *, between_matrices: bool = False) -> Tensor:
        """Values of whole rows without their padding, from those of this rank's parts; see `join_rows`."""
        lengths = [sum(_sizes(row)) for row in self._rows]
        whole = join_rows(own, lengths, self._mesh, between_matrices=between_matrices).split(lengths)
        num_tokens = [sum(batch.num_tokens for _, batch in row) for row in self._rows]
        return torch.cat([values[:count] for values, count in zip(whole, num_tokens, strict=True)])


def _sizes(row: Row) -> list[int]:
    """The number of tokens of each segment, with padding."""
    return [len(batch.input_ids) for _, batch in row]
