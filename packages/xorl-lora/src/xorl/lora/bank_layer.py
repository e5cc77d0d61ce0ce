"""Computes a bank's adapters on a linear layer: many adapters in one pass, each on its own tokens.

Shapes: S slots, I input features, O output features of a layer, P those of a part, R padded rank of a slot (of a layer:
the sum over its parts), T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xorl.core.nn import Linear
from xorl.kernels.grouped_linear import TokenGroups, grouped_linear
from xorl.lora.linear import join_parts


class StackedPair(nn.Module):
    """The adapters of all slots on one part of a layer; A is [S, R, I] and B [S, P, R], fp32.

    If an adapter has a smaller rank or is not on this layer, the rest of its slot is zero. It stays zero, because its
    gradients are zero as well: the output of A is multiplied by zeros of B, and vice versa.

    A and B are not parameters of the model but leaves that the bank trains, so code that shards or saves the model's
    parameters does not see them.

    Attributes:
        name: the adapted layer's name in checkpoints.
        start, stop: the part's output features among those of the layer.
        scale: [S] fp32, the factor of B @ A in each slot.
    """

    def __init__(self, name: str, part: tuple[int, int], a: Tensor, b: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.name = name
        self.start, self.stop = part
        self.A = a
        self.B = b
        self.scale = scale

    def scaled_a(self, dtype: torch.dtype) -> Tensor:
        """scale * A [S, R, I] in `dtype`, rounded like the scaled A of a single adapter."""
        return _scaled(self.A, self.scale[:, None, None], dtype)

    def extra_repr(self) -> str:
        return f"{self.name}, slots={self.A.shape[0]}, rank={self.A.shape[1]}"


class SlotPair(NamedTuple):
    """One slot's adapter on one part of a layer: A [R, I], B [P, R] and the 0-dim scale, sharing the slot's memory.

    A and B are separate leaves whose gradients share the slot's memory too.
    """

    A: Tensor
    B: Tensor
    scale: Tensor


@dataclass
class ActiveRows:
    """The rows of the next forward passes, shared by all layers of a bank, which updates it in place.

    Attributes:
        groups: the slot of each row; only read if several adapters are active.
        num_rows: the number of rows on the host; None before the first `activate`.
    """

    groups: TokenGroups
    num_rows: int | None = None


class BankedLinear(nn.Module):
    """y + scale * (x @ A.T) @ B.T on the output of a linear layer, with A and B of each token's adapter.

    One grouped product computes all As and another all Bs, whatever the number of adapters, in the dtype of x. All
    layers of a bank share `rows`, which the bank updates in place before each forward pass. Leading dims of x are
    flattened to its T tokens; another number raises ValueError, except in compiled code.

    Attributes:
        single: set by the bank if all tokens belong to one adapter. The layer then computes the same as a model with
            that adapter, without reading the groups or other slots. () if no token's adapter is on this layer.
    """

    def __init__(self, pairs: Sequence[StackedPair], rows: ActiveRows) -> None:
        super().__init__()
        self.stacked = nn.ModuleList(pairs)
        self.rows = rows
        self.single: tuple[SlotPair, ...] | None = ()

    def pairs(self) -> list[StackedPair]:
        """The pairs in the order of their output features."""
        pairs: list[StackedPair] = []
        for pair in self.stacked:
            assert isinstance(pair, StackedPair)
            pairs.append(pair)
        return pairs

    def forward(self, x: Tensor, layer: Linear) -> Tensor:
        self._check_rows(x)
        if self.single is not None:
            if not self.single:
                return layer.base(x)
            down, up = self._single_factors(self.single, x.dtype, layer.out_features)
            added = layer.base_plus(x.reshape(-1, layer.in_features), down, up)
            return added.view(*x.shape[:-1], layer.out_features)
        y = layer.base(x)
        down, up = self._factors(x.dtype, layer.out_features)
        low = grouped_linear(x.reshape(-1, layer.in_features), down, self.rows.groups)  # [T, R]
        return grouped_linear(low, up, self.rows.groups, y.reshape(-1, layer.out_features)).view(y.shape)

    def operands(self, x: Tensor, layer: Linear) -> tuple[Tensor, Tensor]:
        """x [T, I + S * R] and the weight [O, I + S * R], whose product is the output.

        x is extended by the output of A in the columns of the token's slot and zeros in those of other slots. The
        weight is extended by the Bs of all slots. If a slot's B is not finite, its columns of the weight are replaced
        by zeros, because zero times NaN would affect all tokens; the columns of its own tokens become NaN instead.
        """
        self._check_rows(x)
        if self.single is not None:
            if not self.single:
                return x, layer.dense_weight(x.dtype)
            down, up = self._single_factors(self.single, x.dtype, layer.out_features)
            low = F.linear(x, down)
            return torch.cat([x, low], dim=1), torch.cat([layer.dense_weight(x.dtype), up], dim=1)
        down, up = self._factors(x.dtype, layer.out_features)
        low = grouped_linear(x, down, self.rows.groups)  # [T, R]
        num_slots, _, rank = up.shape
        tokens = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
        slots = self.rows.groups.order[torch.searchsorted(self.rows.groups.ends, tokens, right=True)]
        bounds = up.detach().amin(dim=(1, 2)), up.detach().amax(dim=(1, 2))
        is_finite = torch.isfinite(bounds[0]) & torch.isfinite(bounds[1])  # [S]
        low = torch.where(is_finite[slots][:, None], low, torch.nan)
        up = torch.where(is_finite[:, None, None], up, 0)
        is_token_slot = slots[:, None, None] == torch.arange(num_slots, device=x.device)[:, None]  # [T, S, 1]
        spread = torch.where(is_token_slot, low[:, None, :], 0).reshape(-1, num_slots * rank)
        ups = up.transpose(0, 1).reshape(-1, num_slots * rank)
        return torch.cat([x, spread], dim=1), torch.cat([layer.dense_weight(x.dtype), ups], dim=1)

    def _check_rows(self, x: Tensor) -> None:
        # Compiled code would be compiled again for each number of rows.
        if torch.compiler.is_compiling() or self.rows.num_rows is None:
            return
        if (num_rows := x.shape[:-1].numel()) != self.rows.num_rows:
            raise ValueError(
                f"runs: AdapterBank.activate assigned {self.rows.num_rows} rows to adapters, but "
                f"{self.stacked[0].name} got {num_rows}; activate the rows of the batch first"
            )

    def _factors(self, dtype: torch.dtype, out_features: int) -> tuple[Tensor, Tensor]:
        """(scale * A [S, R, I], B [S, O, R]) of the layer."""
        pairs = self.pairs()
        downs, ups = [pair.scaled_a(dtype) for pair in pairs], [pair.B.to(dtype) for pair in pairs]
        return join_parts(downs, ups, [(pair.start, pair.stop) for pair in pairs], out_features)

    def _single_factors(
        self, pairs: Sequence[SlotPair], dtype: torch.dtype, out_features: int
    ) -> tuple[Tensor, Tensor]:
        """(scale * A [R, I], B [O, R]) of the layer."""
        downs, ups = [_scaled(one.A, one.scale[None, None], dtype) for one in pairs], [one.B.to(dtype) for one in pairs]
        return join_parts(downs, ups, [(pair.start, pair.stop) for pair in self.pairs()], out_features)


def _scaled(a: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """scale * a in `dtype`: a and the product are rounded to it, but scale [.., 1, 1] fp32 is not.

    The scale must not be 0-dim, because torch would cast it to `dtype` before the product.
    """
    return (a.to(dtype) * scale).to(dtype)
