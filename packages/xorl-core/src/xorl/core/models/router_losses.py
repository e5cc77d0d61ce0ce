"""Losses, statistics and records of routers: where they send tokens, and how evenly.

Both losses are sums over documents, so they do not depend on how a batch is split. As in the token loss, a document
has a weight equal to its number of trained tokens.

Shapes: L layers with experts, N documents, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from xorl.core.nn.moe import LayerRoutes
from xorl.kernels.layout import SequenceLayout, ShardedLayout
from xorl.kernels.torch_private import all_reduce


@dataclass(frozen=True)
class RouterLossOptions:
    """Weights of the losses.

    balance_coef: weight of E * sum_e f_e P_e (arXiv:2101.03961), where f_e is the number of tokens that chose expert e,
        divided by the number of tokens, and P_e is the expert's mean probability. Both are computed for each document
        and averaged over layers; transformers does the same for each batch.
    z_coef: weight of logsumexp(logits)^2, averaged over layers (arXiv:2202.08906).
    """

    balance_coef: float = 0.0
    z_coef: float = 0.0


@dataclass(frozen=True)
class RouterSums:
    """Sums over documents, from which the metrics of routers are computed; they can be added up.

    Attributes:
        values: [L * E + 5] fp64: how many tokens chose each expert, how many choices were replayed and how many of
            these the routers would not have made, the unweighted balancing loss and z-loss, and the number of trained
            tokens.
        num_experts: E.
    """

    values: Tensor
    num_experts: int

    def __add__(self, other: RouterSums) -> RouterSums:
        return RouterSums(self.values + other.values, self.num_experts)

    def metrics(self) -> dict[str, Tensor]:
        """Scalars on the device.

        imbalance: the choices of the most-chosen expert, divided by the mean over experts; the maximum over layers.
        entropy: the entropy of the shares of choices, averaged over layers; 1 if all experts are chosen equally often.
        dead_experts: the number of experts, over all layers, that no token chose.
        """
        counts, losses = self.values[:-5].view(-1, self.num_experts), self.values[-3:]
        share = counts / counts.sum(-1, keepdim=True).clamp(min=1)
        balance, z, _ = (losses / losses[2].clamp(min=1)).unbind()
        return {
            "router_balance_loss": balance,
            "router_z_loss": z,
            "router_imbalance": self.num_experts * share.max(),
            "router_entropy": torch.special.entr(share).sum(-1).mean() / math.log(max(self.num_experts, 2)),
            "router_dead_experts": (counts == 0).sum().double(),
        }

    def replay_metrics(self) -> dict[str, Tensor]:
        """Scalars on the device. changed_routes: the share of replayed choices that the routers would not have made."""
        replayed, changed = self.values[-5:-3].unbind()
        return {"router_changed_routes": changed / replayed.clamp(min=1)}


class RouterLosses:
    """Adds the gradients of the router losses to a model's, and keeps the sums for their metrics.

    Attributes:
        options: the weights.
        num_experts: E.
        num_sums: L * E + 5.
    """

    def __init__(self, num_layers: int, num_experts: int, options: RouterLossOptions) -> None:
        self.options = options
        self.num_experts = num_experts
        self.num_sums = num_layers * num_experts + 5
        self._records = False
        self._newest: tuple[Tensor, Tensor, Tensor] | None = None  # [L, N, E], [2, N] and [3, N]
        self._ids: Tensor | None = None  # [T, L, K]

    def add(self, hidden: Tensor, routes: Sequence[LayerRoutes], layout: SequenceLayout) -> Tensor:
        """Return `hidden` [T, D]; in training, its backward pass also computes the gradients of the losses."""
        if self._records:
            self._ids = torch.stack([layer.ids for layer in routes], dim=1)
        routings = [layer.sums for layer in routes if layer.sums is not None]
        if not routings:
            return hidden
        counts = torch.stack([routing.counts for routing in routings])  # [L, N, E]
        probabilities = torch.stack([routing.probabilities for routing in routings])
        squared_lse = torch.stack([routing.squared_lse for routing in routings])
        # Every rank counts the replayed choices of its own tokens.
        replayed = [layer.replayed for layer in routes if layer.replayed is not None]
        replayed = torch.stack(replayed).sum(0).T if replayed else None
        if isinstance(layout.rows, ShardedLayout):
            # Sums over whole documents. Each rank computes the gradient for its own tokens; only the first counts them.
            counts, probabilities, squared_lse = (
                _SumOverRanks.apply(value, layout.rows.group_name) for value in (counts, probabilities, squared_lse)
            )
            replayed = None if replayed is None else all_reduce(replayed, layout.rows.group_name)
        # Ranks that share matrices all count the same.
        is_counted = layout.is_first if isinstance(layout, ShardedLayout) else True
        lengths = layout.whole.cu_seqlens.diff().to(probabilities.dtype)
        trained = lengths if layout.num_trained is None else layout.num_trained.to(probabilities.dtype)
        weight = trained / lengths  # [N]
        share = counts.to(probabilities.dtype).mean(0) / lengths[:, None]  # [N, E]
        balance = self.num_experts * weight * (share * probabilities.mean(0)).sum(-1)  # [N]
        z = weight * squared_lse.mean(0)
        replayed = counts.new_zeros(2, len(lengths)) if replayed is None else replayed
        losses = torch.stack([balance.detach(), z.detach(), trained])
        self._newest = counts * is_counted, replayed * is_counted, losses * is_counted
        if not self.options.balance_coef and not self.options.z_coef:
            return hidden
        out = _WithLoss.apply(hidden, self.options.balance_coef * balance.sum() + self.options.z_coef * z.sum())
        assert isinstance(out, Tensor)
        return out

    def take(self) -> Tensor:
        """Return and forget the values of `RouterSums` for each document of the last pass, [N, L * E + 5] fp64.

        Raises RuntimeError if there was no pass in training mode since the last call.
        """
        if self._newest is None:
            raise RuntimeError("take: no values; call it once after each forward pass in training mode")
        (counts, replayed, losses), self._newest = self._newest, None
        return torch.cat([counts.transpose(0, 1).flatten(1).double(), replayed.T.double(), losses.T.double()], dim=1)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager for passes whose routes are taken."""
        self._records = True
        try:
            yield
        finally:
            self._records, self._ids = False, None

    def take_routes(self) -> Tensor:
        """Return and forget the experts of each token in the last pass, [T, L, K] int64; call it within `recording`.

        Raises RuntimeError without a pass since `recording` began or since the last call.
        """
        if self._ids is None:
            raise RuntimeError("take_routes: no routes; call it once after each forward pass, within `recording`")
        ids, self._ids = self._ids, None
        return ids


class _SumOverRanks(torch.autograd.Function):
    """The sum over the ranks of a group, whose gradient is the same on all of them: the backward pass sends nothing."""

    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor, group_name: str) -> Tensor:
        return all_reduce(value, group_name)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


class _WithLoss(torch.autograd.Function):
    """Identity on a tensor that adds `loss` to the loss being differentiated, with a gradient of 1."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, loss: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, torch.ones((), dtype=torch.float32, device=grad.device)
