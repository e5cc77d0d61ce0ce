"""BankEngine: training steps for many adapters that share one base model; `Engine` is for a single model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from xorl.ckpt import Stateful
from xorl.core.loss import LossFn, LossOutput
from xorl.core.loss.metrics import metrics_between
from xorl.core.loss.output import TokenValues
from xorl.core.optim import Fp32Accumulation
from xorl.core.parallel import ParallelModel
from xorl.core.parallel.executor import Tensors
from xorl.core.parallel.exposed import record_waits
from xorl.core.parallel.schedule import Schedule
from xorl.data import PackedBatch
from xorl.kernels.head import HeadWeight
from xorl.kernels.layout import SequenceLayout
from xorl.lora import Adam, AdapterBank
from xorl.lora.snapshot import AdapterSnapshot
from xorl.train.engine import OnOutput, StepLosses, Update, to_device
from xorl.train.model_passes import ModelPasses, call_model, executor_of, forward_through, routers_of
from xorl.train.observe.timing import StepTimer
from xorl.train.rows import sizes_in_part


@dataclass(frozen=True)
class MixedBatch:
    """A micro-batch with the tokens of several adapters; those of each adapter are contiguous.

    parts: (adapter, its micro-batch, including padding) in the order of the row. batch: the parts joined; its
    `num_tokens` leaves out only the padding of the last part, which is at the end of the row.
    """

    parts: tuple[tuple[str, PackedBatch], ...]
    batch: PackedBatch

    @classmethod
    def of(cls, parts: Sequence[tuple[str, PackedBatch]]) -> MixedBatch:
        """Join at least one micro-batch, each of another adapter; all have the same columns."""
        return cls(tuple(parts), PackedBatch.join([batch for _, batch in parts]))

    @property
    def runs(self) -> list[tuple[str, int]]:
        """(adapter, number of tokens) along the row."""
        return [(name, len(batch.input_ids)) for name, batch in self.parts]

    @property
    def owners(self) -> list[str | None]:
        """The adapter of each document along the row; None for padding."""
        return [
            name if index < len(batch.document_lengths) else None
            for name, batch in self.parts
            for index in range(len(batch.lengths))
        ]


class BankState:
    """The adapters of a bank and their optimizers as `{adapter}/{tensor}`, for checkpoints; without the base."""

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank

    def state_dict(self) -> dict[str, Tensor]:
        """Copies on the host; a load fills them and passes them to `load_state_dict`."""
        return {
            f"{name}/{key}": tensor
            for name in self._bank.names
            for key, tensor in self._bank.snapshot(name).tensors().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore every adapter from `state`."""
        for name in self._bank.names:
            snapshot = self._bank.snapshot(name)
            tensors = {key: state[f"{name}/{key}"] for key in snapshot.tensors()}
            self._bank.restore(name, AdapterSnapshot.of_tensors(snapshot.spec, snapshot.names, tensors))


class BankEngine:
    """A parallelized, frozen model with a bank of adapters.

    An adapter's gradient is the sum over all its tokens since its last `optim_step`, independent of how these are split
    into calls, micro-batches and ranks, and of the other adapters in them. flops: adapter, lengths of documents ->
    floating-point operations to train on them.
    """

    def __init__(
        self,
        model: ParallelModel,
        bank: AdapterBank,
        device: torch.device,
        *,
        flops: Callable[[str, Sequence[int]], float],
        schedule: Schedule = "1F1B",
    ) -> None:
        self.model = model
        self.bank = bank
        self.device = device
        self._flops = flops
        self.timer = StepTimer(device)
        record_waits(model, self.timer)
        self._executor = executor_of(model, schedule)

    def forward_backward(
        self,
        batches: Iterable[MixedBatch],
        loss_fn: LossFn,
        names: Sequence[str],
        on_output: OnOutput | None = None,
        context: AbstractContextManager[object] | None = None,
    ) -> dict[str, StepLosses]:
        """Add the gradient of the loss, summed over each adapter's tokens; returns each adapter's sums over all ranks.

        Collective: every rank must pass the same number of micro-batches, and the same `names` in the same order: the
        adapters that any rank has tokens of. After a failure on every rank the model is usable again; to continue with
        the earlier gradients, call this within `bank.gradients_kept`. `context` is entered around the passes, but not
        around the reduction of the losses. `on_output` as for `Engine`.
        """
        self.model.train()
        pending = list(batches)
        self.timer.start()
        rows = {name: row for row, name in enumerate(names)}
        losses = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        routers = routers_of(self.model)
        num_sums = 0 if routers is None else routers.num_sums
        routing = torch.zeros(len(names) + 1, num_sums, dtype=torch.float64, device=self.device)  # the last: padding

        def call(index: int, received: Tensors, chunk: int) -> LossOutput | Tensors:
            batch = pending[index].batch
            return call_model(self.model, batch, _isolating(loss_fn), self.device, received, chunk)

        def prepare(index: int) -> None:
            self._activate(pending[index])

        def take(index: int, output: LossOutput | None, by_document: Tensor | None) -> None:
            mixed = pending[index]
            if by_document is not None:
                owners = [len(rows) if name is None else rows[name] for name in mixed.owners]
                routing.index_add_(0, to_device(owners, self.device).long(), by_document)
            if output is None:
                return
            runs = self._own_runs(mixed)
            per_run = output.per_token.split([num_tokens for _, num_tokens in runs])
            for (name, _), loss in zip(runs, per_run, strict=True):
                losses[rows[name]] += loss.double().sum()
            if on_output is not None:
                on_output(index, output)

        rows_of = [mixed.batch for mixed in pending]
        passes = ModelPasses(self.model, self.timer, rows_of, call, take, Fp32Accumulation(()), prepare)
        with self._recovering(), context or nullcontext():
            self._executor.run(len(pending), passes)
        sums = torch.cat([losses[:, None], self._counts(pending, rows), routing[:-1]], dim=1)
        dist.all_reduce(sums, group=self.model.mesh.losses.group)
        self.timer.mark("comm")
        return {name: StepLosses.of(sums[row], routers) for name, row in rows.items()}

    @torch.no_grad()
    def forward(self, mixed: MixedBatch, loss_fn: LossFn) -> LossOutput | None:
        """As `Engine.forward`."""
        self.model.train(False)
        with self._recovering():
            self._activate(mixed)
            call = partial(call_model, self.model, mixed.batch, _isolating(loss_fn), self.device)
            return forward_through(self._executor, self.model, mixed.batch, call)

    def optim_step(
        self,
        name: str,
        adam: Adam,
        divisor: Tensor | float,
        max_grad_norm: float | None,
        kind_of: Callable[[str], str] | None = None,
    ) -> Update:
        """Divide one adapter's accumulated gradient by `divisor`, clip it, take a step and clear it. Collective.

        The step is skipped if the gradient is not finite or the divisor is NaN. `kind_of` (name of an adapted layer ->
        kind of layer), if given, requests gradient norms by kind of layer.
        """
        outcome = self.bank.step(name, adam, divisor=divisor, max_norm=max_grad_norm, kind_of=kind_of)
        self.timer.mark("optimizer")
        return Update(outcome.grad_norm, outcome.skipped, outcome.norms)

    def state(self, *, trained_only: bool = True) -> dict[str, Stateful]:
        """As `Engine.state`; the frozen base is always left out."""
        del trained_only
        return {"adapters": BankState(self.bank)}

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.model.recover()
            raise

    def _activate(self, mixed: MixedBatch) -> None:
        self.bank.activate(self._own_runs(mixed), keeps_earlier=self.model.mesh.dims.pp > 1)

    def _own_runs(self, mixed: MixedBatch) -> list[tuple[str, int]]:
        """(adapter, number of tokens) along this rank's part of the row; without adapters that have no tokens there."""
        sizes = sizes_in_part([num_tokens for _, num_tokens in mixed.runs], self.model.mesh)
        return [(name, size) for (name, _), size in zip(mixed.runs, sizes, strict=True) if size]

    def _counts(self, batches: Sequence[MixedBatch], rows: Mapping[str, int]) -> Tensor:
        """Trained tokens, tokens and FLOPs of this rank's micro-batches by adapter, on the device.

        If ranks share rows, only the first of them counts, and of a pipeline the last stage.
        """
        if self.model.mesh.context.rank > 0 or self.model.mesh.pp.rank > 0:
            batches = []
        counts = [[0.0, 0.0, 0.0, 0.0] for _ in rows]
        for name, batch in (part for mixed in batches for part in mixed.parts):
            count = counts[rows[name]]
            count[0] += batch.num_terms
            count[1] += batch.num_trained_tokens
            count[2] += batch.num_tokens
            count[3] += self._flops(name, batch.document_lengths)
        return to_device(counts, self.device)


def _isolating(loss_fn: LossFn) -> LossFn:
    """Wrap `loss_fn` so that tokens with non-finite hidden states have no gradient, and NaN as their loss.

    The gradient of the head sums over the tokens of all adapters; there, zero times NaN would spread to all of them.
    """

    def isolated(
        hidden: Tensor, head: HeadWeight, targets: Mapping[str, Tensor], layout: SequenceLayout, /
    ) -> LossOutput:
        is_finite = torch.isfinite(hidden.detach()).all(dim=1)
        output = loss_fn(torch.where(is_finite[:, None], hidden, 0), head, targets, layout)
        return _with_nan(output, ~is_finite)

    return isolated


def _with_nan(output: LossOutput, invalid: Tensor) -> LossOutput:
    """Set all values of the `invalid` tokens, [T] bool, to NaN; `output.sum`, which is differentiated, stays."""
    logprobs, values = output.logprobs, output.values
    output = output._replace(per_token=output.per_token.masked_fill(invalid, torch.nan))
    if logprobs is not None:
        # [T] or [T, K]
        rows = invalid.view(-1, *[1] * (logprobs.dim() - 1))
        output = output._replace(logprobs=logprobs.masked_fill(rows, torch.nan))
    if values is None:
        return output
    # Some values are boolean, which masked_fill would keep.
    means = {name: torch.where(invalid, torch.nan, value) for name, value in values.means.items()}
    ratio = None if values.ratio is None else values.ratio.masked_fill(invalid, torch.nan)
    output = output._replace(values=TokenValues(values.trained, means, ratio))
    return output._replace(metrics=metrics_between(output, 0, len(invalid)))
