"""Expert parallelism: tokens are sent to the ranks that hold their experts, which return what their experts add.

A rank sends a token once to every rank that holds any of its experts, whatever their number there. That rank computes
the weighted sum over its own experts, and the sums of all ranks are added. Each exchange is the other's gradient.

Shapes: T tokens of this rank, S rows that it sends, R rows that it receives, K experts per token, E experts, P ranks,
D model width.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from xorl.kernels.experts.plan import is_padding
from xorl.kernels.experts.products import between_products
from xorl.kernels.layout import RankGroup
from xorl.kernels.torch_private import all_to_all


class Received(NamedTuple):
    """The tokens and choices that the experts of a rank compute.

    x: [R, D].
    weights: [R, K], of all experts of a token.
    ids: [R, K], indices of this rank's experts; their number stands for experts of other ranks.
    num_rows: how many of `ids` are of this rank; None if the host does not know.
    num_passes: in how many parts to compute them.
    """

    x: Tensor
    weights: Tensor
    ids: Tensor
    num_rows: int | None
    num_passes: int = 1


PlanT = TypeVar("PlanT")


class Dispatcher(Protocol[PlanT]):
    """Exchanges tokens among the ranks of `group`, which hold equal ranges of the experts in the order of the ranks.

    All methods but `wait` are collective, also for a rank without tokens, and so are their backward passes.

    Attributes:
        returns_late: whether `combine` returns before its result is there; `wait` must be called before it is used.
    """

    group: RankGroup

    @property
    def returns_late(self) -> bool: ...

    def plan(self, ids: Tensor, num_experts: int, num_real: Tensor | None, most_tokens: int | None = None) -> PlanT:
        """Begin to find out who sends how much.

        Args:
            ids: [T, K] integers in [0, E).
            num_experts: E, a multiple of P.
            num_real: 0-d integer tensor; tokens from this index on are padding, which is not computed.
            most_tokens: the largest T of a rank, the same on all; None if that is not known.
        """
        ...

    def dispatch(self, x: Tensor, weights: Tensor, plan: PlanT) -> Received:
        """Send x [T, D] and weights [T, K] as planned; differentiable."""
        ...

    def combine(self, out: Tensor, plan: PlanT) -> Tensor:
        """Return what the experts computed from x, [R, D], and add it up: [T, D], 0 for padding; differentiable."""
        ...

    def wait(self, plan: PlanT) -> None:
        """Make the device wait for the result of `combine`."""
        ...


class _Plan:
    """The sizes of one layer's exchange.

    Attributes:
        ids: [T, K].
        num_local: experts of each rank.
        rows: [T, P] int32, the row that is sent to each rank; `num_sent` or more if none is.
        tokens: [T * P] int64, the token of each row in the order in which they are sent, by rank.
        num_sent: [1] int32, S.
    """

    def __init__(self, ids: Tensor, num_experts: int, num_real: Tensor | None, group: RankGroup) -> None:
        num_tokens, size = len(ids), group.size
        self.ids, self.num_local = ids, num_experts // size
        ranks = ids // self.num_local
        if num_real is not None:
            ranks = ranks.masked_fill(is_padding(num_tokens, num_real)[:, None], size)
        # The last column takes what is sent to no rank.
        needs = torch.zeros(num_tokens, size + 1, dtype=torch.bool, device=ids.device).scatter_(1, ranks, True)
        choices = ids.new_zeros(size + 1).scatter_add_(0, ranks.flatten(), torch.ones_like(ids).flatten())
        needs = needs[:, :size].t().flatten()  # by rank
        sent = torch.stack([needs.view(size, num_tokens).sum(1), choices[:size]], dim=1)
        received = all_to_all(sent, [1] * size, [1] * size, group.name)
        self._sizes, self._copied = _to_host(torch.stack([sent, received]))
        position = needs.cumsum(0) - 1
        position = torch.where(needs, position, len(needs))
        self.tokens = torch.empty(len(needs) + 1, dtype=torch.int64, device=ids.device)
        self.tokens[position] = torch.arange(num_tokens, device=ids.device).repeat(size)
        self.rows = position.view(size, num_tokens).t().to(torch.int32).contiguous()
        self.num_sent = sent[:, 0].sum(0, keepdim=True).to(torch.int32)

    def sizes(self) -> tuple[list[int], list[int], int]:
        """The rows sent to each rank and received from each, and how many choices these are; waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        sent, received = self._sizes.tolist()
        return [rows for rows, _ in sent], [rows for rows, _ in received], sum(choices for _, choices in received)

    def summed(self, values: Tensor) -> Tensor:
        """The sums over the rows of each token, [S, ..] to [T, ..], in the order of the ranks."""
        return between_products(values).combine(values, None, self.rows, self.num_sent)


class AllToAll:
    """A `Dispatcher` by collectives of torch. The host waits once in a layer, for the numbers of rows."""

    returns_late = False

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def plan(self, ids: Tensor, num_experts: int, num_real: Tensor | None, most_tokens: int | None = None) -> _Plan:
        """As `Dispatcher.plan`; this exchange does not need `most_tokens`."""
        return _Plan(ids, num_experts, num_real, self.group)

    def dispatch(self, x: Tensor, weights: Tensor, plan: _Plan) -> Received:
        """As `Dispatcher.dispatch`."""
        sent, received, num_rows = plan.sizes()
        tokens = plan.tokens[: sum(sent)]
        exchanged, found, ids = _Dispatch.apply(x, weights, plan, tokens, sent, received, self.group.name)
        local = ids - self.group.rank * plan.num_local
        local = torch.where((local >= 0) & (local < plan.num_local), local, plan.num_local)
        return Received(exchanged, found, local, num_rows)

    def combine(self, out: Tensor, plan: _Plan) -> Tensor:
        """As `Dispatcher.combine`."""
        sent, received, _ = plan.sizes()
        return _Combine.apply(out, plan, plan.tokens[: sum(sent)], sent, received, self.group.name)

    def wait(self, plan: _Plan) -> None:
        """Does nothing: the result is there."""


class _Context(FunctionCtx):
    plan: _Plan
    tokens: Tensor
    sent: list[int]
    received: list[int]
    group_name: str


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        x: Tensor,
        weights: Tensor,
        plan: _Plan,
        tokens: Tensor,
        sent: list[int],
        received: list[int],
        group_name: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.plan, ctx.tokens, ctx.sent, ctx.received, ctx.group_name = plan, tokens, sent, received, group_name
        # Indices of experts are exact in fp32.
        routes = torch.cat([weights[tokens], plan.ids[tokens].to(weights.dtype)], dim=1)
        routes = all_to_all(routes, sent, received, group_name)
        exchanged = all_to_all(x[tokens], sent, received, group_name)
        found, ids = routes.chunk(2, dim=1)
        ids = ids.to(plan.ids.dtype)
        ctx.mark_non_differentiable(ids)
        return exchanged, found.contiguous(), ids

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_inputs = (ctx.plan.summed(all_to_all(grad, ctx.received, ctx.sent, ctx.group_name)) for grad in grads[:2])
        return *of_inputs, None, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        out: Tensor,
        plan: _Plan,
        tokens: Tensor,
        sent: list[int],
        received: list[int],
        group_name: str,
    ) -> Tensor:
        ctx.tokens, ctx.sent, ctx.received, ctx.group_name = tokens, sent, received, group_name
        return plan.summed(all_to_all(out, received, sent, group_name))

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [grad] = grads
        return all_to_all(grad[ctx.tokens], ctx.sent, ctx.received, ctx.group_name), None, None, None, None, None


def _to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy in host memory, and an event after which it is complete; None if it is already."""
    if not values.is_cuda:
        return values, None
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return copy, copied
