"""Metrics of losses: scalars on the device, combined over micro-batches and ranks and read once at the end.

The name of a metric defines how its values are combined: `name:sum`, `name:min`, `name:max` or `name:mean`. Means are
kept as sums over trained tokens until `read_metrics` divides them by the number of trained tokens,
`valid_tokens:sum`. So every token has the same weight, however tokens are split into micro-batches. Scalars are fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from xorl.core.loss.output import LossOutput, TokenValues

# The metric that counts trained tokens; clients of the service know it by this name.
NUM_TRAINED = "valid_tokens:sum"


def token_metrics(per_token: Tensor, values: TokenValues) -> dict[str, Tensor]:
    """The metrics of T tokens, a micro-batch or a range within one, from the loss of each token [T]."""
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
    """The metrics of tokens [start, stop) of a micro-batch; the range must not be empty."""
    assert output.values is not None, "the loss returns no token values"
    trained, means, ratio = output.values
    part = slice(start, stop)
    values = TokenValues(
        trained[part],
        {name: value[part] for name, value in means.items()},
        None if ratio is None else ratio[part],
    )
    return token_metrics(output.per_token[part], values)


def empty_metrics(names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """The metrics of zero tokens: the identity when combined with others."""
    return {name: torch.tensor(_IDENTITY[_reduction(name)], dtype=torch.float64, device=device) for name in names}


def combine_metrics(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Combine the metrics of several micro-batches of one loss; raises ValueError if their names differ."""
    partly = sorted({name for part in parts for name in part if any(name not in other for other in parts)})
    if partly or not parts:
        came = f"only some have {', '.join(partly)}" if partly else "there are none"
        raise ValueError(f"parts: must be metrics of one loss, which have the same names; {came}")
    return {name: _REDUCE[_reduction(name)](torch.stack([part[name] for part in parts])) for name in parts[0]}


def all_reduce_metrics(metrics: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Combine the metrics of all ranks; collective.

    Every rank must pass the same names. A loss always returns the same names, whatever its micro-batch contains.
    Values may also be tensors, all of one shape.
    """
    sum_names = [name for name in metrics if _reduction(name) in ("sum", "mean")]
    min_names = [name for name in metrics if _reduction(name) == "min"]
    max_names = [name for name in metrics if _reduction(name) == "max"]
    reduced: dict[str, Tensor] = {}
    extremes = [*(-metrics[name] for name in min_names), *(metrics[name] for name in max_names)]
    # A MAX reduction may drop NaN; a sum keeps it.
    nans = [torch.where(torch.isnan(values), values, 0.0) for values in extremes]
    sums = torch.stack([*(metrics[name] for name in sum_names), *nans])
    dist.all_reduce(sums, group=group)
    reduced.update(zip(sum_names, sums[: len(sum_names)].unbind(), strict=True))
    if extremes:
        maxima = torch.stack(extremes)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        values = (maxima + sums[len(sum_names) :]).unbind()
        reduced.update((name, -value) for name, value in zip(min_names, values[: len(min_names)], strict=True))
        reduced.update(zip(max_names, values[len(min_names) :], strict=True))
    return {name: reduced[name] for name in metrics}


def read_metrics(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Copy the metrics to the host and divide the means; synchronises once.

    If no token was trained, means and extremes are undefined and left out. Raises ValueError for metrics without
    `valid_tokens:sum`, and for names with another reduction.
    """
    if NUM_TRAINED not in metrics:
        raise ValueError(f"metrics: there is no {NUM_TRAINED} among {', '.join(metrics) or 'none'}")
    values = dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))
    num_trained = values[NUM_TRAINED]
    return {
        name: value / num_trained if _reduction(name) == "mean" else value
        for name, value in values.items()
        if num_trained or _reduction(name) == "sum"
    }


def _reduction(name: str) -> str:
    reduction = name.rpartition(":")[2]
    if reduction not in _REDUCE:
        raise ValueError(f"metrics: {name!r} is not named by its reduction, such as 'loss:mean': {', '.join(_REDUCE)}")
    return reduction


_REDUCE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda values: values.sum(),
    "mean": lambda values: values.sum(),
    "min": lambda values: values.amin(),
    "max": lambda values: values.amax(),
}
_IDENTITY: Mapping[str, float] = {"sum": 0.0, "mean": 0.0, "min": float("inf"), "max": float("-inf")}
