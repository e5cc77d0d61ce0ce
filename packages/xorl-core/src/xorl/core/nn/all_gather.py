"""Expert parallelism without exchanges of uneven size: every rank gets the tokens of all, and the sums are added up.

With a few active experts on each of a few ranks, most pairs of a token and a rank would be sent anyway: 90 % with 8
active experts on 4 ranks. Here all are sent, so sizes depend only on the number of tokens: the host never waits, and
layers can be compiled.

Shapes: T tokens of this rank, M tokens of the rank that has most, P ranks, K experts per token, E experts, D model
width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from xorl.core.graphs import Graphs
from xorl.core.nn.dispatch import AllToAll, Received
from xorl.kernels.experts.plan import is_padding
from xorl.kernels.experts.products import between_products
from xorl.kernels.layout import RankGroup
from xorl.kernels.torch_private import all_gather, all_to_all

# In place of a group's name: the rank pretends that the others hold the same rows.
ALONE = ""


def sent_share(num_ranks: int, num_active: int) -> float:
    """The share of all pairs of a token and a rank that an exact exchange sends, if experts are chosen evenly."""
    return 1 - (1 - 1 / num_ranks) ** num_active


def passes_of(num_ranks: int) -> int:
    """In how many parts a rank computes the choices of all: each has room for twice the mean of the ranks."""
    return max(num_ranks // 2, 1)


class AllGather:
    """A `Dispatcher` that gathers the tokens of all ranks. Without `most_tokens`, it exchanges them like `AllToAll`.

    A rank computes as many choices at once as twice its mean. If routing is so uneven that it has more, later passes
    compute the others (`Received.num_passes`), which are empty otherwise.

    Tokens and sums travel in the compute dtype. Sums of ranks are added in fp32 and rounded once, as with `AllToAll`.

    Args:
        group: the ranks that share the experts.
        alone: pretend that all ranks hold this one's tokens, for a measurement without the others.

    Attributes:
        graphs: of the experts whose tokens it gathers (`gathered_experts`).
    """

    returns_late = False

    def __init__(self, group: RankGroup, *, alone: bool = False) -> None:
        self.group = group
        self.graphs = Graphs()
        self._alone = alone
        self._exact = AllToAll(group)

    def plan(
        self, ids: Tensor, num_experts: int, num_real: Tensor | None, most_tokens: int | None = None
    ) -> GatherPlan | object:
        """As `Dispatcher.plan`."""
        if most_tokens is None and not self._alone:
            return self._exact.plan(ids, num_experts, num_real)
        num_tokens = ids.shape[0]
        if num_real is not None:
            ids = ids.masked_fill(is_padding(num_tokens, num_real)[:, None], num_experts)
        return GatherPlan(ids, 0 if most_tokens is None else most_tokens - num_tokens, num_experts)

    def dispatch(self, x: Tensor, weights: Tensor, plan: GatherPlan | object) -> Received:
        """As `Dispatcher.dispatch`."""
        if not isinstance(plan, GatherPlan):
            return self._exact.dispatch(x, weights, plan)  # pyright: ignore[reportArgumentType] of its own `plan`
        rank, size, _ = self.group
        gathered = gather_tokens(x, weights, plan.ids, plan.num_missing, plan.num_experts, rank, size, self.group_name)
        all_x, all_weights, all_ids = gathered
        return Received(all_x, all_weights, all_ids, num_rows=None, num_passes=passes_of(size))

    def combine(self, out: Tensor, plan: GatherPlan | object) -> Tensor:
        """As `Dispatcher.combine`."""
        if not isinstance(plan, GatherPlan):
            return self._exact.combine(out, plan)  # pyright: ignore[reportArgumentType] of its own `plan`
        return reduce_rows(out, plan.ids.shape[0], self.group.size, self.group_name)

    def wait(self, plan: GatherPlan | object) -> None:
        """Does nothing: the result is there."""

    @property
    def group_name(self) -> str:
        """Of the collectives; ALONE if there are none."""
        return ALONE if self._alone else self.group.name


class GatherPlan(NamedTuple):
    """The choices and sizes of one layer's gather.

    ids: [T, K]; E for padding.
    num_missing: M - T.
    num_experts: E.
    """

    ids: Tensor
    num_missing: int
    num_experts: int


def gather(x: Tensor, num_ranks: int, group_name: str) -> Tensor:
    """The rows [M, ..] of all ranks, [P * M, ..]. Collective."""
    if group_name == ALONE:
        return x.repeat(num_ranks, *[1] * (x.dim() - 1))
    return all_gather(x, num_ranks, group_name)


def reduce(y: Tensor, num_ranks: int, group_name: str) -> Tensor:
    """This rank's rows [M, ..] of the sum of y [P * M, ..] over ranks, added in fp32 and rounded once. Collective."""
    sizes = [y.shape[0] // num_ranks] * num_ranks
    received = y if group_name == ALONE else all_to_all(y, sizes, sizes, group_name)
    return between_products(received).sum_parts(received.unflatten(0, (num_ranks, -1)))


def padded(x: Tensor, num_missing: int, value: float = 0) -> Tensor:
    """[T, ..] with `num_missing` rows of `value` after them."""
    return F.pad(x, (0, 0, 0, num_missing), value=value) if num_missing else x


@torch.library.custom_op("xorl::gather_tokens", mutates_args=())
def gather_tokens(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    num_missing: int,
    num_experts: int,
    rank: int,
    num_ranks: int,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [P * M, D], the weights [P * M, K] and the ids [P * M, K] of `Received`."""
    # Indices of experts are exact in fp32.
    routes = torch.cat([weights, ids.to(weights.dtype)], dim=1)
    routes = gather(padded(routes, num_missing, num_experts), num_ranks, group_name)
    found, local = routes.chunk(2, dim=1)
    num_local = num_experts // num_ranks
    local = local.to(ids.dtype) - rank * num_local
    local = torch.where((local >= 0) & (local < num_local), local, num_local)
    return gather(padded(x, num_missing), num_ranks, group_name), found.contiguous(), local


@gather_tokens.register_fake
def _(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    num_missing: int,
    num_experts: int,
    rank: int,
    num_ranks: int,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = (x.shape[0] + num_missing) * num_ranks
    gathered, found, local = (tensor.new_empty(num_rows, tensor.shape[1]) for tensor in (x, weights, ids))
    return gathered, found, local


@torch.library.custom_op("xorl::reduce_tokens", mutates_args=())
def reduce_tokens(
    grad_x: Tensor, grad_weights: Tensor, num_tokens: int, num_ranks: int, group_name: str
) -> tuple[Tensor, Tensor]:
    """The gradients of x [T, D] and of the weights [T, K] of `gather_tokens`."""
    of_x, of_weights = (reduce(grad, num_ranks, group_name)[:num_tokens] for grad in (grad_x, grad_weights))
    return of_x, of_weights


@reduce_tokens.register_fake
def _(grad_x: Tensor, grad_weights: Tensor, num_tokens: int, num_ranks: int, group_name: str) -> tuple[Tensor, Tensor]:
    return grad_x.new_empty(num_tokens, grad_x.shape[1]), grad_weights.new_empty(num_tokens, grad_weights.shape[1])


@torch.library.custom_op("xorl::reduce_rows", mutates_args=())
def reduce_rows(y: Tensor, num_tokens: int, num_ranks: int, group_name: str) -> Tensor:
    """The sum over ranks of this rank's rows of y [P * M, D], [T, D]."""
    return reduce(y, num_ranks, group_name)[:num_tokens]


@reduce_rows.register_fake
def _(y: Tensor, num_tokens: int, num_ranks: int, group_name: str) -> Tensor:
    return y.new_empty(num_tokens, y.shape[1])


@torch.library.custom_op("xorl::gather_rows", mutates_args=())
def gather_rows(y: Tensor, num_missing: int, num_ranks: int, group_name: str) -> Tensor:
    """The rows of y [T, D] of all ranks, [P * M, D]."""
    return gather(padded(y, num_missing), num_ranks, group_name)


@gather_rows.register_fake
def _(y: Tensor, num_missing: int, num_ranks: int, group_name: str) -> Tensor:
    return y.new_empty((y.shape[0] + num_missing) * num_ranks, y.shape[1])


class _Context(FunctionCtx):
    num_tokens: int
    num_missing: int
    ranks: tuple[int, str]


def _save_gather(ctx: _Context, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, *_, num_ranks, group_name = inputs
    ctx.num_tokens, ctx.ranks = x.shape[0], (num_ranks, group_name)
    ctx.mark_non_differentiable(output[2])


def _differentiate_gather(ctx: _Context, grad_x: Tensor, grad_weights: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *reduce_tokens(grad_x, grad_weights, ctx.num_tokens, *ctx.ranks), None, None, None, None, None, None


def _save_reduce(ctx: _Context, inputs: tuple[Tensor, int, int, str], output: Tensor) -> None:
    y, num_tokens, num_ranks, group_name = inputs
    ctx.num_missing, ctx.ranks = y.shape[0] // num_ranks - num_tokens, (num_ranks, group_name)


def _differentiate_reduce(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return gather_rows(grad, ctx.num_missing, *ctx.ranks), None, None, None


gather_tokens.register_autograd(_differentiate_gather, setup_context=_save_gather)
reduce_rows.register_autograd(_differentiate_reduce, setup_context=_save_reduce)
