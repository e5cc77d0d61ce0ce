"""Where tokens go: each token's choices of experts, sorted by expert, without a host synchronisation.

Shapes: T tokens, K experts per token, M = T * K rows, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class RoutePlan(NamedTuple):
    """The rows that experts compute, in the order of the experts. All tensors are on the device of the tokens.

    Rows of one expert are adjacent and in the order of their tokens. Choices without an expert, such as those of
    padding, come last, and nothing reads their rows.

    choices: [M] int32, the choice t * K + k of each row.
    rows: [T, K] int32, the row of each choice; from the last end on if it has no expert, negative if it is in an
        earlier part.
    ends: [E] int32, the end of each expert's rows; experts may have none.
    """

    choices: Tensor
    rows: Tensor
    ends: Tensor

    @classmethod
    def of(
        cls, ids: Tensor, num_experts: int, num_real: Tensor | None = None, num_rows: int | None = None
    ) -> RoutePlan:
        """The plan for the chosen experts.

        Args:
            ids: [T, K] integers in [0, E], a token's choices all different; E is a choice without an expert.
            num_experts: E.
            num_real: 0-d integer tensor on the device; tokens from this index on are padding. None: there is no
                padding.
            num_rows: how many choices have an expert, if the host knows it: M is then this number, not T * K.
        """
        choices, rows, ends = _route_plan(ids, num_experts, num_real)
        return cls(choices if num_rows is None else choices[:num_rows], rows, ends)

    def parts(self, count: int) -> Iterator[RoutePlan]:
        """The plan as `count` plans of almost equal size, of adjacent rows; those of the last ones may all be padding.

        The rows of a part count from its first one, so those of choices in earlier parts are negative.
        """
        if count == 1:
            yield self
            return
        size = -(-self.choices.shape[0] // count)
        for part in range(count):
            choices = self.choices[part * size : (part + 1) * size]
            yield RoutePlan(choices, self.rows - part * size, (self.ends - part * size).clamp(0, choices.shape[0]))


@torch.library.custom_op("xorl::route_plan", mutates_args=())
def _route_plan(ids: Tensor, num_experts: int, num_real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, num_choices = ids.shape
    keys = ids.to(torch.int32)
    if num_real is not None:
        keys = keys.masked_fill(is_padding(num_tokens, num_real)[:, None], num_experts)
    experts, order = keys.flatten().sort(stable=True)
    places = torch.arange(len(order), dtype=torch.int32, device=ids.device)
    rows = torch.empty_like(places).scatter_(0, order, places)
    last = torch.arange(num_experts, dtype=torch.int32, device=ids.device)
    ends = torch.searchsorted(experts, last, right=True, out_int32=True)
    return order.to(torch.int32), rows.view(num_tokens, num_choices), ends


@_route_plan.register_fake
def _(ids: Tensor, num_experts: int, num_real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    rows = ids.new_empty(ids.shape, dtype=torch.int32)
    return rows.new_empty(ids.shape[0] * ids.shape[1]), rows, rows.new_empty(num_experts)


def is_padding(num_tokens: int, num_real: Tensor) -> Tensor:
    """[T] bool, for tokens of which those from the index `num_real` (0-d) on are padding."""
    return torch.arange(num_tokens, device=num_real.device) >= num_real
