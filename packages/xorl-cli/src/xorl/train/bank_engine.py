"""BankEngine: the steps of training for many adapters that share one base model; `Engine` is for a single model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from xorl.core.loss import LossFn, LossOutput, TokenValues, metrics_between
from xorl.core.parallel import ParallelModel, record_waits
from xorl.data import PackedBatch
from xorl.lora import Adam, AdapterBank
from xorl.train.engine import OnOutput, StepLosses, Update, call_model, to_device
from xorl.train.observe.timing import StepTimer


@dataclass(frozen=True)
class MixedBatch:
    """One micro-batch in which adapters have tokens: those of each are neighbours.

    parts: (adapter, its own micro-batch, padding and all) in the order of the row; `batch` is all of them in one.
    """

    parts: tuple[tuple[str, PackedBatch], ...]
    batch: PackedBatch

    @classmethod
    def of(cls, parts: Sequence[tuple[str, PackedBatch]]) -> MixedBatch:
        """Join micro-batches of different adapters, at least one; all have the same extras."""
        batches = [batch for _, batch in parts]
        starts = accumulate((len(batch.input_ids) for batch in batches), initial=0)
        borders = [batch.cu_seqlens[1:] + start for batch, start in zip(batches, starts, strict=False)]
        joined = PackedBatch(
            input_ids=torch.cat([batch.input_ids for batch in batches]),
            labels=torch.cat([batch.labels for batch in batches]),
            positions=torch.cat([batch.positions for batch in batches]),
            cu_seqlens=torch.cat([batches[0].cu_seqlens[:1], *borders]),
            lengths=tuple(length for batch in batches for length in batch.lengths),
            num_tokens=sum(batch.num_tokens for batch in batches),
            num_trained_tokens=sum(batch.num_trained_tokens for batch in batches),
            extras={name: torch.cat([batch.extras[name] for batch in batches]) for name in batches[0].extras},
        )
        return cls(tuple(parts), joined)

    @property
    def runs(self) -> list[tuple[str, int]]:
        """(adapter, number of tokens) along the row."""
        return [(name, len(batch.input_ids)) for name, batch in self.parts]


class BankEngine:
    """A placed, frozen model, and the bank of adapters on it.

    Gradients are sums over every token of every call since the last `optim_step` of an adapter, whatever the split
    into calls, micro-batches and ranks, and whoever else is in them. flops: by adapter, of documents of given lengths.
    """

    def __init__(
        self,
        model: ParallelModel,
        bank: AdapterBank,
        device: torch.device,
        *,
        flops: Callable[[str, Sequence[int]], float],
    ) -> None:
        self.model = model
        self.bank = bank
        self.device = device
        self._flops = flops
        self.timer = StepTimer(device)
        record_waits(model, self.timer)

    def forward_backward(
        self,
        batches: Iterable[MixedBatch],
        loss_fn: LossFn,
        names: Sequence[str],
        on_output: OnOutput | None = None,
        whole: AbstractContextManager[object] | None = None,
    ) -> dict[str, StepLosses]:
        """Add each adapter's gradient of the summed loss over its tokens; returns the sums of each over all ranks.

        Collective: every rank must bring the same number of micro-batches and the same `names`, in their order; these
        are the adapters that any rank has tokens of. Where it fails on every rank, the model can compute again; who
        goes on then puts `bank.gradients_kept` around it. `whole` is what else must not fail: it surrounds the passes.
        `on_output` as for `Engine`.
        """
        self.model.train()
        pending = list(batches)
        self.timer.start()
        places = {name: place for place, name in enumerate(names)}
        losses = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        with self._recovering(), whole or nullcontext():
            for index, mixed in enumerate(pending):
                self.bank.activate(mixed.runs)
                output = call_model(self.model, mixed.batch, _isolating(loss_fn), self.device)
                self.timer.mark("forward")
                output.sum.backward()
                self.timer.end_wait()
                self.timer.mark("backward")
                for (name, _), own in zip(mixed.runs, _by_run(output, mixed), strict=True):
                    losses[places[name]] += own.double().sum()
                if on_output is not None:
                    on_output(index, output)
        sums = torch.cat([losses[:, None], self._counts(pending, places)], dim=1)
        dist.all_reduce(sums, group=self.model.mesh.dp_group)
        self.timer.mark("comm")
        return {name: StepLosses(*sums[place].unbind()) for name, place in places.items()}

    @torch.no_grad()
    def forward(self, mixed: MixedBatch, loss_fn: LossFn) -> LossOutput:
        """The loss of one micro-batch on this rank, without gradients; collective where parameters are sharded."""
        self.model.train(False)
        with self._recovering():
            self.bank.activate(mixed.runs)
            return call_model(self.model, mixed.batch, _isolating(loss_fn), self.device)

    def optim_step(
        self,
        name: str,
        adam: Adam,
        divisor: Tensor | float,
        max_grad_norm: float | None,
        kind_of: Callable[[str], str] | None = None,
    ) -> Update:
        """Divide one adapter's accumulated gradient by `divisor`, clip it, step and zero it; collective.

        A divisor that is NaN changes nothing, as a gradient that is not finite. `kind_of` asks for norms by kind of
        layer, which it tells of an adapted layer's name.
        """
        outcome = self.bank.step(name, adam, divisor=divisor, max_norm=max_grad_norm, kind_of=kind_of)
        self.timer.mark("optimizer")
        return Update(outcome.grad_norm, outcome.skipped, outcome.norms)

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.model.recover()
            raise

    def _counts(self, batches: Sequence[MixedBatch], places: Mapping[str, int]) -> Tensor:
        """Trained tokens, tokens and FLOPs of this rank's micro-batches by adapter, on the device."""
        counts = [[0.0, 0.0, 0.0] for _ in places]
        for name, batch in (part for mixed in batches for part in mixed.parts):
            row = counts[places[name]]
            row[0] += batch.num_trained_tokens
            row[1] += batch.num_tokens
            row[2] += self._flops(name, batch.document_lengths)
        return to_device(counts, self.device)


def _isolating(loss_fn: LossFn) -> LossFn:
    """`loss_fn`, in which tokens with values that are not finite have no loss to differentiate, and NaN to be seen.

    The head's gradient is a sum over tokens of all adapters, in which zero times NaN would be everyone's.
    """

    def isolated(hidden: Tensor, weight: Tensor, targets: Mapping[str, Tensor]) -> LossOutput:
        is_finite = torch.isfinite(hidden.detach()).all(dim=1)
        output = loss_fn(torch.where(is_finite[:, None], hidden, 0), weight, targets)
        return _with_nan(output, ~is_finite)

    return isolated


def _with_nan(output: LossOutput, spoilt: Tensor) -> LossOutput:
    """NaN in whatever `output` says of the `spoilt` tokens, [T] bool; its sum is what is differentiated, and stays."""
    logprobs, values = output.logprobs, output.values
    output = output._replace(per_token=output.per_token.masked_fill(spoilt, torch.nan))
    if logprobs is not None:
        # [T] or [T, K]
        rows = spoilt.view(-1, *[1] * (logprobs.dim() - 1))
        output = output._replace(logprobs=logprobs.masked_fill(rows, torch.nan))
    if values is None:
        return output
    # Some are booleans, which a fill would leave so.
    means = {name: torch.where(spoilt, torch.nan, value) for name, value in values.means.items()}
    ratio = None if values.ratio is None else values.ratio.masked_fill(spoilt, torch.nan)
    output = output._replace(values=TokenValues(values.trained, means, ratio))
    return output._replace(metrics=metrics_between(output, 0, len(spoilt)))


def _by_run(output: LossOutput, mixed: MixedBatch) -> tuple[Tensor, ...]:
    """The losses of the tokens of each adapter in a row."""
    return output.per_token.split([length for _, length in mixed.runs])
