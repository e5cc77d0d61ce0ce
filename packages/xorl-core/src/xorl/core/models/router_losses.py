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
from torch.nn import functional as F

from xorl.core.models.decoder_config import ExpertsConfig
from xorl.core.nn.moe import LayerRoutes
from xorl.kernels.arguments import is_readable
from xorl.kernels.layout import SequenceLayout, ShardedLayout
from xorl.kernels.torch_private import all_reduce

_RECORDED_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class RouterLossOptions:
    """Weights of the losses, and what evens out the load of experts without a loss.

    balance_coef: weight of E * sum_e f_e P_e (arXiv:2101.03961), where f_e is the number of tokens that chose expert e,
        divided by the number of tokens, and P_e is the expert's mean probability. Both are computed for each document
        and averaged over layers; transformers does the same for each batch.
    z_coef: weight of logsumexp(logits)^2, averaged over layers (arXiv:2202.08906).
    correction_rate: what a step adds to the corrections of experts that fewer tokens than the mean chose, and subtracts
        from those of experts that more chose (arXiv:2408.15664).
    """

    balance_coef: float = 0.0
    z_coef: float = 0.0
    correction_rate: float = 0.0


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

    @property
    def counts(self) -> Tensor:
        """[L, E]: how many tokens chose each expert."""
        return self.values[:-5].view(-1, self.num_experts)

    def metrics(self) -> dict[str, Tensor]:
        """Scalars on the device.

        imbalance: the choices of the most-chosen expert, divided by the mean over experts; the maximum over layers.
        entropy: the entropy of the shares of choices, averaged over layers; 1 if all experts are chosen equally often.
        dead_experts: the number of experts, over all layers, that no token chose.
        """
        counts, losses = self.counts, self.values[-3:]
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
        self._num_layers = num_layers
        self._records = False
        self._newest: tuple[Tensor, Tensor, Tensor] | None = None  # [L, N, E], [2, N] and [3, N]
        self._ids: Tensor | None = None  # [T, L, K]

    def shape_of_sums(self, num_documents: int) -> tuple[int, int]:
        """The shape of the sums over layers that the stages of a pipeline pass on."""
        return num_documents, 2 * self.num_experts + 1

    def record(self, routes: Sequence[LayerRoutes]) -> None:
        """Keep the experts of each token, within `recording`."""
        if self._records:
            self._ids = torch.stack([layer.ids for layer in routes], dim=1)

    def add(
        self,
        hidden: Tensor,
        routes: Sequence[LayerRoutes],
        layout: SequenceLayout,
        *,
        place: slice,
        before: Tensor | None = None,
        is_last: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """In training, return `hidden` [T, D] and the sums over layers so far.

        The backward pass of the returned `hidden` also computes the gradients of the losses.

        place: of the layers with these routes, among the L layers. before: the sums over earlier layers. is_last:
            whether no layers follow; the losses are those of the last layers.

        The sums over layers are [N, 2 * E + 1] fp32: for each document, the share of its tokens that chose each expert,
        and the sums over its tokens of each expert's probability and of the squared logsumexp.
        """
        lengths = layout.whole.cu_seqlens.diff().float()
        trained = lengths if layout.num_trained is None else layout.num_trained.float()
        if routes:
            counts, terms, replayed = _sums_of(routes, layout)
            shares = counts.to(terms.dtype).sum(0) / lengths[:, None]
            sums = torch.cat([shares, terms.sum(0)], dim=1) + (0.0 if before is None else before)
        else:
            counts = torch.zeros(0, len(lengths), self.num_experts, dtype=torch.int32, device=lengths.device)
            replayed = lengths.new_zeros(2, len(lengths))
            sums = lengths.new_zeros(self.shape_of_sums(len(lengths))) if before is None else before
        # Ranks that share matrices all count the same.
        is_counted = layout.is_first if isinstance(layout, ShardedLayout) else True
        if is_last:
            weight = trained / lengths  # [N]
            shares, probabilities, squared_lse = (sums / self._num_layers).split([self.num_experts] * 2 + [1], dim=1)
            balance = self.num_experts * weight * (shares * probabilities).sum(-1)  # [N]
            z = weight * squared_lse[:, 0]
            losses = torch.stack([balance.detach(), z.detach(), trained])
            if self.options.balance_coef or self.options.z_coef:
                hidden = _with_loss(hidden, self.options.balance_coef * balance.sum() + self.options.z_coef * z.sum())
        else:
            losses = torch.zeros(3, len(lengths), device=lengths.device)
        counts = F.pad(counts, (0, 0, 0, 0, place.start, self._num_layers - place.stop))
        self._newest = counts * is_counted, replayed * is_counted, losses * is_counted
        return hidden, sums

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


def check_recorded(recorded: Tensor, input_ids: Tensor, mixtures: Sequence[ExpertsConfig]) -> None:
    """Raise ValueError unless these are experts for each of the tokens and of the layers with experts."""
    if not mixtures:
        raise ValueError("recorded: the model has no experts; leave recorded experts out")
    shape = (input_ids.numel(), len(mixtures), mixtures[0].num_active)
    if not isinstance(recorded, Tensor) or recorded.shape != shape or recorded.dtype not in _RECORDED_DTYPES:
        came = f"{recorded.dtype} {list(recorded.shape)}" if isinstance(recorded, Tensor) else type(recorded).__name__
        raise ValueError(f"recorded: must be integers {list(shape)} (tokens, layers with experts, active), got {came}")
    if not is_readable(recorded):
        return
    ordered = recorded.long().sort(-1).values
    is_record = (ordered[..., 0] >= 0) & (ordered[..., -1] < mixtures[0].num_experts) & (ordered.diff() > 0).all(-1)
    if not (is_record | (recorded == -1).all(-1)).all():
        limit = mixtures[0].num_experts - 1
        raise ValueError(f"recorded: the experts of a token must all differ, from 0 to {limit}, or all be -1")


def _sums_of(routes: Sequence[LayerRoutes], layout: SequenceLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Of layers: counts [L, N, E]; probabilities and squared logsumexps [L, N, E + 1]; replayed choices [2, N]."""
    routings = [layer.sums for layer in routes if layer.sums is not None]
    assert len(routings) == len(routes), "routes of a pass in training"
    counts = torch.stack([routing.counts for routing in routings])
    terms = torch.stack(
        [torch.cat([routing.probabilities, routing.squared_lse[:, None]], dim=1) for routing in routings]
    )
    # Every rank counts the replayed choices of its own tokens.
    found = [layer.replayed for layer in routes if layer.replayed is not None]
    replayed = torch.stack(found).sum(0).T if found else counts.new_zeros(2, counts.shape[1])
    if isinstance(layout.rows, ShardedLayout):
        # Sums over whole documents. Each rank computes the gradient for its own tokens; only the first counts them.
        group = layout.rows.group_name
        summed = _SumOverRanks.apply(terms, group)
        assert isinstance(summed, Tensor)
        counts, terms = all_reduce(counts, group), summed
        replayed = all_reduce(replayed, group) if found else replayed
    return counts, terms, replayed


def _with_loss(hidden: Tensor, loss: Tensor) -> Tensor:
    out = _WithLoss.apply(hidden, loss)
    assert isinstance(out, Tensor)
    return out


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
