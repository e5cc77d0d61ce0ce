"""Losses and statistics of routers: how evenly they spread tokens over experts.

Both losses are sums over documents, so they do not depend on how a batch is split. A document counts as often as it has
trained tokens, as in the loss of its tokens.

Shapes: L layers with experts, N documents, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from xorl.core.nn.moe import Routing
from xorl.kernels.layout import SequenceLayout

BalanceScope = Literal["document", "global"]


@dataclass(frozen=True)
class RouterLossOptions:
    """Weights of the losses.

    balance_coef: of E * sum_e f_e P_e (arXiv:2101.03961), f the share of choices of each expert times K and P its mean
        probability. balance_scope: document takes f and P of each document, averaged over layers, as transformers does
        for a batch. global takes f of each layer from the previous optimizer step (uniform in the first).
    z_coef: of the mean over layers of logsumexp(logits)^2 (arXiv:2202.08906).
    """

    balance_coef: float = 0.0
    balance_scope: BalanceScope = "document"
    z_coef: float = 0.0


class RouterLosses:
    """Adds the losses of a model's routers to its gradient, and counts where tokens went.

    Attributes:
        options: the weights.
        load: [L, E] fp32, f of the previous optimizer step.
        counts: [L, E] fp64, choices of each expert since `take`.
        sums: [2] fp64, the balancing loss and the z-loss, without their weights, since `take`.
    """

    def __init__(self, num_layers: int, num_experts: int, num_active: int) -> None:
        self.options = RouterLossOptions()
        self._num_active = num_active
        self.load = torch.full((num_layers, num_experts), num_active / num_experts, device="cpu")
        self.counts = torch.zeros(num_layers, num_experts, dtype=torch.float64, device="cpu")
        self.sums = torch.zeros(2, dtype=torch.float64, device="cpu")

    def add(self, hidden: Tensor, routings: Sequence[Routing], layout: SequenceLayout) -> Tensor:
        """`hidden`, whose backward pass also computes the gradients of the losses."""
        if self.counts.device != hidden.device:
            self.load, self.counts, self.sums = (x.to(hidden.device) for x in (self.load, self.counts, self.sums))
        counts = torch.stack([routing.counts for routing in routings])  # [L, N, E]
        probabilities = torch.stack([routing.probabilities for routing in routings])
        lengths = layout.cu_seqlens.diff().to(probabilities.dtype)
        trained = lengths if layout.num_trained is None else layout.num_trained.to(probabilities.dtype)
        weight = trained / lengths  # [N]
        if self.options.balance_scope == "document":
            share = counts.to(probabilities.dtype).mean(0) / lengths[:, None]  # [N, E]
            by_document = (share * probabilities.mean(0)).sum(-1)
        else:
            by_document = (self.load[:, None] * probabilities).mean(0).sum(-1)
        num_experts = counts.shape[-1]
        balance = num_experts * (weight * by_document).sum()
        z = (weight * torch.stack([routing.squared_lse for routing in routings]).mean(0)).sum()
        with torch.no_grad():
            self.counts += counts.sum(1)
            self.sums += torch.stack([balance, z])
        if not self.options.balance_coef and not self.options.z_coef:
            return hidden
        out = _WithLoss.apply(hidden, self.options.balance_coef * balance + self.options.z_coef * z)
        assert isinstance(out, Tensor)
        return out

    def take(self) -> tuple[Tensor, Tensor]:
        """`counts` and `sums`, which start again at zero."""
        taken = self.counts, self.sums
        self.counts, self.sums = torch.zeros_like(self.counts), torch.zeros_like(self.sums)
        return taken

    def finish_step(self, counts: Tensor) -> None:
        """Set `load` from the choices [L, E] of all ranks in the optimizer step."""
        total = counts.sum(-1, keepdim=True)
        load = (self._num_active * counts / total.clamp(min=1)).to(self.load.dtype)
        self.load = torch.where(total > 0, load, self.load.to(load.device))


def router_metrics(counts: Tensor, sums: Tensor, num_trained: Tensor) -> dict[str, Tensor]:
    """Metrics of a step, from the choices [L, E] and loss sums [2] of all ranks; scalars on the device.

    imbalance: the choices of the busiest expert over the mean, in the layer where this is largest. entropy: of the
    shares of choices, averaged over layers; 1 if all experts are chosen equally often. dead_experts: how many experts,
    over all layers, no token chose.
    """
    num_experts = counts.shape[-1]
    share = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    balance, z = (sums / num_trained.clamp(min=1)).unbind()
    return {
        "router_balance_loss": balance,
        "router_z_loss": z,
        "router_imbalance": num_experts * share.max(),
        "router_entropy": torch.special.entr(share).sum(-1).mean() / math.log(max(num_experts, 2)),
        "router_dead_experts": (counts == 0).sum().double(),
    }


class _WithLoss(torch.autograd.Function):
    """A tensor, and a loss that is added to the sum that the tensor's gradient is taken of."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, loss: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, torch.ones((), dtype=torch.float32, device=grad.device)
