"""The computation of a bank's adapters beside a linear layer: many adapters, each on its own tokens, in one pass.

Shapes: S slots, I input features, O output features of a layer, P those of a part, R rank that a slot has room for (of
a layer: the sum over its parts), T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xorl.core.nn import Linear
from xorl.kernels.grouped_linear import TokenGroups, grouped_linear
from xorl.lora.linear import join_parts


class StackedPair(nn.Module):
    """The adapters of all slots on one part of a layer; A is [S, R, I] and B [S, P, R], fp32.

    If an adapter has a smaller rank or is not on this layer, the rest of its slot is zero. It stays zero, because the
    gradients are zero too: the output of A is multiplied by zeros of B, and vice versa.

    Neither is a parameter of the model: they are leaves that the bank trains, and code that places, shards or saves the
    model's parameters does not see them.

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
    """One slot's adapter on one part of a layer: A [R, I], B [P, R], and the scale, 0-dim, in the slot's memory.

    They are separate leaves, whose gradients are the slot's.
    """

    A: Tensor
    B: Tensor
    scale: Tensor


class BankedLinear(nn.Module):
    """y + scale * (x @ A.T) @ B.T on the output of a linear layer, with A and B of each token's adapter.

    One grouped product for all As and one for all Bs, whatever the number of adapters; computed in the dtype of x. All
    layers of a bank share `groups`, which the bank changes in place before each forward pass of several adapters.
    Leading dimensions of x are flattened to the T tokens of `groups`. If all tokens belong to one adapter, the bank
    sets `alone`, and the layer computes the same as a model with that adapter, without reading other slots or `groups`;
    () means that no token's adapter is on this layer.
    """

    def __init__(self, pairs: Sequence[StackedPair], groups: TokenGroups) -> None:
        super().__init__()
        self.stacked = nn.ModuleList(pairs)
        self.groups = groups
        self.alone: tuple[SlotPair, ...] | None = None

    def pairs(self) -> list[StackedPair]:
        """In the order of their output features."""
        pairs: list[StackedPair] = []
        for pair in self.stacked:
            assert isinstance(pair, StackedPair)
            pairs.append(pair)
        return pairs

    def forward(self, x: Tensor, layer: Linear) -> Tensor:
        if self.alone is not None:
            if not self.alone:
                return layer.base(x)
            down, up = self._factors_alone(self.alone, x.dtype, layer.out_features)
            added = layer.base_plus(x.reshape(-1, layer.in_features), down, up)
            return added.view(*x.shape[:-1], layer.out_features)
        y = layer.base(x)
        down, up = self._factors(x.dtype, layer.out_features)
        low = grouped_linear(x.reshape(-1, layer.in_features), down, self.groups)  # [T, R]
        return grouped_linear(low, up, self.groups, y.reshape(-1, layer.out_features)).view(y.shape)

    def operands(self, x: Tensor, layer: Linear) -> tuple[Tensor, Tensor]:
        """x [T, I + S * R] and the weight [O, I + S * R], whose product is the output.

        x is extended by the output of A, in the columns of the token's slot and zero in the others; the weight by the
        Bs of all slots. If a slot's B is not finite, its columns of the weight are zeros, because zero times NaN would
        reach the output of all tokens; the columns of its own tokens are then NaN.
        """
        if self.alone is not None:
            if not self.alone:
                return x, layer.dense_weight(x.dtype)
            down, up = self._factors_alone(self.alone, x.dtype, layer.out_features)
            low = F.linear(x, down)
            return torch.cat([x, low], dim=1), torch.cat([layer.dense_weight(x.dtype), up], dim=1)
        down, up = self._factors(x.dtype, layer.out_features)
        low = grouped_linear(x, down, self.groups)  # [T, R]
        num_slots, _, rank = up.shape
        tokens = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
        slots = self.groups.order[torch.searchsorted(self.groups.ends, tokens, right=True)]
        bounds = up.detach().amin(dim=(1, 2)), up.detach().amax(dim=(1, 2))
        is_sound = torch.isfinite(bounds[0]) & torch.isfinite(bounds[1])  # [S]
        low = torch.where(is_sound[slots][:, None], low, torch.nan)
        up = torch.where(is_sound[:, None, None], up, 0)
        is_own = slots[:, None, None] == torch.arange(num_slots, device=x.device)[:, None]  # [T, S, 1]
        spread = torch.where(is_own, low[:, None, :], 0).reshape(-1, num_slots * rank)
        ups = up.transpose(0, 1).reshape(-1, num_slots * rank)
        return torch.cat([x, spread], dim=1), torch.cat([layer.dense_weight(x.dtype), ups], dim=1)

    def _factors(self, dtype: torch.dtype, out_features: int) -> tuple[Tensor, Tensor]:
        """(scale * A [S, R, I], B [S, O, R]) of the layer."""
        pairs = self.pairs()
        downs, ups = [pair.scaled_a(dtype) for pair in pairs], [pair.B.to(dtype) for pair in pairs]
        return join_parts(downs, ups, [(pair.start, pair.stop) for pair in pairs], out_features)

    def _factors_alone(self, alone: Sequence[SlotPair], dtype: torch.dtype, out_features: int) -> tuple[Tensor, Tensor]:
        """(scale * A [R, I], B [O, R]) of the layer."""
        downs, ups = [_scaled(one.A, one.scale[None, None], dtype) for one in alone], [one.B.to(dtype) for one in alone]
        return join_parts(downs, ups, [(pair.start, pair.stop) for pair in self.pairs()], out_features)


def _scaled(a: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """scale * a, where a is first rounded to `dtype` and the product again; scale [.., 1, 1] fp32 is not rounded.

    A 0-dim scale would be cast to `dtype` before the product.
    """
    return (a.to(dtype) * scale).to(dtype)
