"""Metrics of losses: scalars on the device that add up over micro-batches and ranks, and are read once at the end.

A name says how its values are put together: `name:sum`, `name:min`, `name:max` and `name:mean`, where a mean is a sum
over trained tokens until `read_metrics` divides it by `valid_tokens:sum`, the number of them. So means weigh tokens
alike, however these are split. Scalars are fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

NUM_TOKENS = "valid_tokens:sum"


def token_metrics(
    per_token: Tensor, trained: Tensor, means: Mapping[str, Tensor] | None = None, ratio: Tensor | None = None
) -> dict[str, Tensor]:
    """Metrics of one micro-batch of T tokens, without gradient.

    Args:
        per_token: [T], the loss of each token.
        trained: [T] bool, the tokens that count.
        means: [T] by name, averaged over the tokens that count.
        ratio: [T], of probabilities, of which mean and extremes are given.
    """
    per_token = per_token.detach()
    loss_sum = per_token.sum(dtype=torch.float64)
    metrics = {"loss:sum": loss_sum, "loss:mean": loss_sum, NUM_TOKENS: trained.sum(dtype=torch.float64)}
    ignored = ~trained
    for name, values in (means or {}).items():
        metrics[f"{name}:mean"] = values.detach().double().masked_fill(ignored, 0.0).sum()
    if ratio is not None:
        ratio = ratio.detach().double()
        metrics["ratio_mean:mean"] = ratio.masked_fill(ignored, 0.0).sum()
        metrics["ratio_min:min"] = ratio.masked_fill(ignored, torch.inf).amin()
        metrics["ratio_max:max"] = ratio.masked_fill(ignored, -torch.inf).amax()
    return metrics


def combine_metrics(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The metrics of several micro-batches of one loss as one."""
    return {name: _REDUCE[_reduction(name)](torch.stack([part[name] for part in parts])) for name in parts[0]}


def all_reduce_metrics(metrics: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """The metrics of all ranks as one; collective.

    Every rank brings the same names, which are those of the loss, whatever is in its micro-batches.
    """
    added = [name for name in metrics if _reduction(name) in ("sum", "mean")]
    smallest = [name for name in metrics if _reduction(name) == "min"]
    largest = [name for name in metrics if _reduction(name) == "max"]
    reduced: dict[str, Tensor] = {}
    sums = torch.stack([metrics[name] for name in added])
    dist.all_reduce(sums, group=group)
    reduced.update(zip(added, sums.unbind(), strict=True))
    if smallest or largest:
        extremes = torch.stack([*(-metrics[name] for name in smallest), *(metrics[name] for name in largest)])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        values = extremes.unbind()
        reduced.update((name, -value) for name, value in zip(smallest, values[: len(smallest)], strict=True))
        reduced.update(zip(largest, values[len(smallest) :], strict=True))
    return {name: reduced[name] for name in metrics}


def read_metrics(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Numbers on the host, means divided; waits for the device, once.

    Over no tokens at all there are no means and extremes, and these names are left out.
    """
    values = dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))
    num_tokens = values[NUM_TOKENS]
    return {
        name: value / num_tokens if _reduction(name) == "mean" else value
        for name, value in values.items()
        if num_tokens or _reduction(name) == "sum"
    }


def _reduction(name: str) -> str:
    return name.rpartition(":")[2]


_REDUCE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda values: values.sum(),
    "mean": lambda values: values.sum(),
    "min": lambda values: values.amin(),
    "max": lambda values: values.amax(),
}
