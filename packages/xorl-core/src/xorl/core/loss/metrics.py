"""Metrics of losses: scalars on the device that are combined over micro-batches and ranks, and read once at the end.

The name of a metric says how its values are combined: `name:sum`, `name:min`, `name:max` or `name:mean`. A mean is kept
as a sum over trained tokens until `read_metrics` divides it by their number, `valid_tokens:sum`, so every token has the
same weight, however tokens are split into micro-batches. Scalars are fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from xorl.core.loss.output import LossOutput, TokenValues

# The metric that counts trained tokens, under the name that clients of the service know.
NUM_TRAINED = "valid_tokens:sum"


def token_metrics(per_token: Tensor, values: TokenValues) -> dict[str, Tensor]:
    """Metrics of one micro-batch of T tokens, or of some neighbours among them, from the loss of each token [T]."""
    per_token = per_token.detach()
    loss_sum = per_token.sum(dtype=torch.float64)
    metrics = {"loss:sum": loss_sum, "loss:mean": loss_sum, NUM_TRAINED: values.trained.sum(dtype=torch.float64)}
    ignored = ~values.trained
    for name, value in values.means.items():
        metrics[f"{name}:mean"] = value.double().masked_fill(ignored, 0.0).sum()
    if values.ratio is not None:
        ratio = values.ratio.double()
        metrics["ratio_mean:mean"] = ratio.masked_fill(ignored, 0.0).sum()
        metrics["ratio_min:min"] = ratio.masked_fill(ignored, torch.inf).amin()
        metrics["ratio_max:max"] = ratio.masked_fill(ignored, -torch.inf).amax()
    return metrics


def metrics_between(output: LossOutput, start: int, stop: int) -> dict[str, Tensor]:
    """The metrics of the tokens [start, stop) of a micro-batch, at least one."""
    assert output.values is not None, "a loss of the table"
    trained, means, ratio = output.values
    part = slice(start, stop)
    values = TokenValues(
        trained[part],
        {name: value[part] for name, value in means.items()},
        None if ratio is None else ratio[part],
    )
    return token_metrics(output.per_token[part], values)


def no_metrics(names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """The metrics of no tokens, which change nothing where they are combined with others."""
    return {name: torch.tensor(_OF_NOTHING[_reduction(name)], dtype=torch.float64, device=device) for name in names}


def combine_metrics(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The metrics of several micro-batches of one loss as one."""
    return {name: _REDUCE[_reduction(name)](torch.stack([part[name] for part in parts])) for name in parts[0]}


def all_reduce_metrics(metrics: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """The metrics of all ranks as one; collective.

    Every rank brings the same names, which are those of the loss, whatever is in its micro-batches. In place of scalars
    there may be tensors of one shape.
    """
    added = [name for name in metrics if _reduction(name) in ("sum", "mean")]
    smallest = [name for name in metrics if _reduction(name) == "min"]
    largest = [name for name in metrics if _reduction(name) == "max"]
    reduced: dict[str, Tensor] = {}
    extremes = [*(-metrics[name] for name in smallest), *(metrics[name] for name in largest)]
    # A maximum over ranks may leave NaN out, and a sum does not.
    spoilt = [torch.where(torch.isnan(values), values, 0.0) for values in extremes]
    sums = torch.stack([*(metrics[name] for name in added), *spoilt])
    dist.all_reduce(sums, group=group)
    reduced.update(zip(added, sums[: len(added)].unbind(), strict=True))
    if extremes:
        most = torch.stack(extremes)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        values = (most + sums[len(added) :]).unbind()
        reduced.update((name, -value) for name, value in zip(smallest, values[: len(smallest)], strict=True))
        reduced.update(zip(largest, values[len(smallest) :], strict=True))
    return {name: reduced[name] for name in metrics}


def read_metrics(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Numbers on the host, means divided; waits for the device, once.

    Over no tokens at all there are no means and extremes, and these names are left out.
    """
    values = dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))
    num_trained = values[NUM_TRAINED]
    return {
        name: value / num_trained if _reduction(name) == "mean" else value
        for name, value in values.items()
        if num_trained or _reduction(name) == "sum"
    }


def _reduction(name: str) -> str:
    return name.rpartition(":")[2]


_REDUCE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda values: values.sum(),
    "mean": lambda values: values.sum(),
    "min": lambda values: values.amin(),
    "max": lambda values: values.amax(),
}
_OF_NOTHING: Mapping[str, float] = {"sum": 0.0, "mean": 0.0, "min": float("inf"), "max": float("-inf")}
