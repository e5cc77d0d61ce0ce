"""Computes a bank's adapters on a linear layer or on experts: many adapters in one pass, each on its own tokens.

Shapes: S slots, E experts, I input features, O output features of a layer, P those of a part, R padded rank of a slot
(of a layer: the sum over its parts), T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xorl.core.nn import Linear
from xorl.core.nn.moe import Experts
from xorl.kernels.experts.adapted import Factors
from xorl.kernels.grouped_linear import TokenGroups, grouped_linear
from xorl.lora.linear import join_parts


class StackedPair(nn.Module):
    """The adapters of all slots on one part of a layer; A is [S, R, I] and B [S, P, R], fp32.

    On a projection of experts, A is [S, E, R, I] and B [S, E, P, R], for the experts of all ranks.

    If an adapter has a smaller rank or is not on this layer, the rest of its slot is zero. It stays zero, because its
    gradients are zero as well: the output of A is multiplied by zeros of B, and vice versa.

    A and B are not parameters of the model but leaves that the bank trains, so code that shards or saves the model's
    parameters does not see them.

    Attributes:
        name: the adapted layer's name in checkpoints.
        projection: the name of the module that computes it, in its parent.
        start, stop: the part's output features among those of the layer.
        scale: [S] fp32, the factor of B @ A in each slot.
    """

    def __init__(self, name: str, projection: str, part: tuple[int, int], a: Tensor, b: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.name = name
        self.projection = projection
        self.start, self.stop = part
        self.A = a
        self.B = b
        self.scale = scale

    def scaled_a(self, dtype: torch.dtype) -> Tensor:
        """scale * A [S, R, I] in `dtype`, rounded like the scaled A of a single adapter."""
        return _scaled(self.A, self.scale.view(-1, *[1] * (self.A.ndim - 1)), dtype)

    def extra_repr(self) -> str:
        return f"{self.name}, slots={self.A.shape[0]}, rank={self.A.shape[-2]}"


class SlotPair(NamedTuple):
    """One slot's adapter on one part of a layer: A [R, I], B [P, R] and the 0-dim scale, sharing the slot's memory.

    On a projection of experts, A is [E, R, I] and B [E, P, R]. A and B are separate leaves whose gradients share the
    slot's memory too.
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
        gone: an adapter of these rows that has left the device since, or None.
        passing: with expert parallelism, the slots [N] of the adapters that any rank has tokens of, in an order on
            which the ranks agree; the last is that of the base.
        places: the index in `passing` of each slot, [S].
    """

    groups: TokenGroups
    num_rows: int | None = None
    gone: str | None = None
    passing: Tensor | None = None
    places: Tensor | None = None

    def check_resident(self) -> None:
        """Raises ValueError if an adapter of the rows has left the device: its slot may hold another one."""
        if self.gone is not None:
            raise ValueError(
                f"runs: {self.gone!r} has left the device since AdapterBank.activate assigned rows to it; activate the "
                "rows of the batch again"
            )

    def check(self, x: Tensor, name: str) -> None:
        """Raises ValueError if the input of the layer `name` has another number of rows, except in compiled code."""
        # Compiled code would be compiled again for each number of rows.
        if torch.compiler.is_compiling() or self.num_rows is None:
            return
        if (num_rows := x.shape[:-1].numel()) != self.num_rows:
            raise ValueError(
                f"runs: AdapterBank.activate assigned {self.num_rows} rows to adapters, but {name} got {num_rows}; "
                "activate the rows of the batch first"
            )

    def slots(self, num_rows: int) -> Tensor:
        """The slot of each row, [num_rows] int32."""
        rows = torch.arange(num_rows, device=self.groups.ends.device, dtype=torch.int32)
        return self.groups.order[torch.searchsorted(self.groups.ends, rows, right=True)]


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
        return [cast(StackedPair, pair) for pair in self.stacked]

    def forward(self, x: Tensor, layer: Linear) -> Tensor:
        self.rows.check(x, self.pairs()[0].name)
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
        self.rows.check(x, self.pairs()[0].name)
        if self.single is not None:
            if not self.single:
                return x, layer.dense_weight(x.dtype)
            down, up = self._single_factors(self.single, x.dtype, layer.out_features)
            low = F.linear(x, down)
            return torch.cat([x, low], dim=1), torch.cat([layer.dense_weight(x.dtype), up], dim=1)
        down, up = self._factors(x.dtype, layer.out_features)
        low = grouped_linear(x, down, self.rows.groups)  # [T, R]
        num_slots, _, rank = up.shape
        slots = self.rows.slots(len(x))
        bounds = up.detach().amin(dim=(1, 2)), up.detach().amax(dim=(1, 2))
        is_finite = torch.isfinite(bounds[0]) & torch.isfinite(bounds[1])  # [S]
        low = torch.where(is_finite[slots][:, None], low, torch.nan)
        up = torch.where(is_finite[:, None, None], up, 0)
        is_token_slot = slots[:, None, None] == torch.arange(num_slots, device=x.device)[:, None]  # [T, S, 1]
        spread = torch.where(is_token_slot, low[:, None, :], 0).reshape(-1, num_slots * rank)
        ups = up.transpose(0, 1).reshape(-1, num_slots * rank)
        return torch.cat([x, spread], dim=1), torch.cat([layer.dense_weight(x.dtype), ups], dim=1)

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


class BankedExperts(nn.Module):
    """The adapters of a bank on the experts of a layer, as `xorl.lora.experts.ExpertsAdapter` for each token's adapter.

    The experts of a layer and their adapters are multiplied by one grouped product each: a group is an expert for the
    base, and an expert and a slot for the adapters. With expert parallelism, tokens of other ranks arrive with the
    index of their adapter in `ActiveRows.passing` in place of the slot, which may differ between ranks.

    Attributes:
        single: as that of a BankedLinear, but None with expert parallelism.
    """

    def __init__(self, pairs: Sequence[StackedPair], rows: ActiveRows, experts: Experts) -> None:
        super().__init__()
        self.stacked = nn.ModuleList(pairs)
        self.rows = rows
        self.single: tuple[SlotPair, ...] | None = ()
        self.is_divided = experts.dispatcher is not None
        self._held = experts.gate_up_proj.held
        self._sizes = {
            name: (layer.out_features, layer.in_features)
            for name, layer in (("gate_up_proj", experts.gate_up_proj), ("down_proj", experts.down_proj))
        }

    def pairs(self) -> list[StackedPair]:
        """The pairs in the order of the layer's rows."""
        return [cast(StackedPair, pair) for pair in self.stacked]

    def slots(self, x: Tensor) -> tuple[Tensor, int] | None:
        """As `ExpertsAdapterProtocol.slots`."""
        self.rows.check(x, self.pairs()[0].name)
        if self.single is not None:
            return None
        slots = self.rows.slots(len(x))
        if self.rows.places is not None:
            slots = self.rows.places[slots]
        return slots, self._num_slots

    @property
    def _num_slots(self) -> int:
        if self.single is not None:
            return 1
        return len(self.pairs()[0].scale) if self.rows.passing is None else len(self.rows.passing)

    def forward(self, x: Tensor, shared: Mapping[str, Tensor]) -> Factors | None:
        """What the kernel adds, for the input x [T, D]; None if no adapter is on this layer."""
        assert not shared, "experts share no factors of a bank"
        if self.single == ():
            return None
        up, down = (self._factors(x, projection) for projection in ("gate_up_proj", "down_proj"))
        return Factors(*up, *down, num_slots=self._num_slots)

    def _factors(self, x: Tensor, projection: str) -> tuple[Tensor, Tensor]:
        """A [E * S, R, I] and B [E * S, O, R] of a projection and the experts of this rank."""
        out_features, in_features = self._sizes[projection]
        stacked = self.pairs()
        chosen = [index for index, pair in enumerate(stacked) if pair.projection == projection]
        if not chosen:
            num_groups = len(self._held) * self._num_slots
            return x.new_empty(num_groups, 0, in_features), x.new_empty(num_groups, out_features, 0)
        downs: list[Tensor] = []
        ups: list[Tensor] = []
        for index in chosen:
            if self.single is None:
                pair = stacked[index]
                a, b = self._passing(pair.scaled_a(x.dtype)), self._passing(pair.B.to(x.dtype))
            else:
                slot = self.single[index]
                a, b = _scaled(slot.A, slot.scale[None, None, None], x.dtype)[None], slot.B.to(x.dtype)[None]
            downs.append(self._of_held(a).transpose(0, 1))
            ups.append(self._of_held(b).transpose(0, 1))
        parts = [(stacked[index].start, stacked[index].stop) for index in chosen]
        a, b = join_parts(downs, ups, parts, out_features)
        return a.flatten(0, 1), b.flatten(0, 1)

    def _of_held(self, stacked: Tensor) -> Tensor:
        """The factors of this rank's experts; those that all experts share as they are, if the kernel can read them."""
        if stacked.shape[1] > 1:
            return stacked[:, self._held.start : self._held.stop]
        return stacked if self._num_slots == 1 else stacked.expand(-1, len(self._held), -1, -1)

    def _passing(self, stacked: Tensor) -> Tensor:
        return stacked if self.rows.passing is None else stacked.index_select(0, self.rows.passing)


def belongs_to_bank(model: nn.Module) -> bool:
    """Whether a bank has its adapters on any layer of `model`."""
    return any(isinstance(module, (BankedLinear, BankedExperts)) for module in model.modules())


def _scaled(a: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """scale * a in `dtype`: a and the product are rounded to it, but scale [.., 1, 1] fp32 is not.

    The scale must not be 0-dim, because torch would cast it to `dtype` before the product.
    """
    return (a.to(dtype) * scale).to(dtype)
