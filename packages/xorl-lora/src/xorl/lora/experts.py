"""Adapters on the experts of a layer: one pair of factors for each expert, all of them in two stacked parameters.

Shapes: E experts that this rank holds, T tokens, I input features, P output features of a projection, R rank, D model
width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xorl.core.nn.moe import ExpertLinear, Experts
from xorl.core.nn.parts import Part
from xorl.kernels.experts.adapted import Factors
from xorl.lora.linear import LowRank, join_parts

# The grouped products of a GPU need rows of 16 bytes.
RANK_MULTIPLE = 8


class ExpertLowRank(LowRank):
    """The adapters on one projection of all experts. A is [E * R, I] and B [E * P, R]: the rows of each are adjacent.

    Attributes:
        projection: the name of the module in `Experts` that stores the projection.
        members: the names of the experts' layers in checkpoints, of those on other ranks too.
        held: the indices in `members` of the experts that this rank holds.
        num_active: experts that a token goes to.
        start, stop: the projection's rows among those of one expert in that module.
        parts: the rows of A and B, if other ranks hold some of the experts.
    """

    def __init__(
        self,
        name: str,
        *,
        members: Sequence[str],
        projection: str,
        layer: ExpertLinear,
        rank: int,
        alpha: float,
        scale: float,
        part: tuple[int, int],
        num_active: int,
        device: torch.device,
    ) -> None:
        in_features = layer.in_features
        super().__init__(
            name,
            rank=rank,
            alpha=alpha,
            scale=scale,
            part=part,
            in_features=in_features,
            use_dora=False,
            device=device,
        )
        self.members = tuple(members)
        self.projection = projection
        self.held = layer.held
        self.num_active = num_active
        width = self.stop - self.start
        self.A = nn.Parameter(torch.empty(len(self.held) * rank, in_features, dtype=torch.float32, device=device))
        self.B = nn.Parameter(torch.empty(len(self.held) * width, rank, dtype=torch.float32, device=device))
        self.parts: Mapping[str, Part] = {}
        if layer.parts:
            axes = layer.parts["weight"].sharded_over
            self.parts = {
                leaf: Part(len(members) * rows, ((self.held.start * rows, self.held.stop * rows),), axes)
                for leaf, rows in (("A", rank), ("B", width))
            }

    @property
    def matrix_rows(self) -> Mapping[str, Sequence[int]]:
        """The rows of each expert's matrix in A and B, for optimizers that treat matrices separately."""
        count = len(self.held)
        return {"A": (self.rank,) * count, "B": (self.stop - self.start,) * count}

    @property
    def held_members(self) -> Sequence[str]:
        """The names of the layers that this rank holds."""
        return self.members[self.held.start : self.held.stop]

    def stacked(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """scale * A [E, R, I] and B [E, P, R] in `dtype`."""
        count = len(self.held)
        return self.scaled_a(dtype).unflatten(0, (count, -1)), self.B.to(dtype).unflatten(0, (count, -1))


class ExpertsAdapter(nn.Module):
    """The adapters of the experts of a layer; each child is the adapter of one projection, under its name.

    gate and up share one dropout mask, as the parts of any stacked layer do.
    """

    def __init__(self, pairs: Sequence[ExpertLowRank], dropout: float, experts: Experts) -> None:
        super().__init__()
        self.leaves = tuple(pair.name.rpartition(".")[2] for pair in pairs)
        for leaf, pair in zip(self.leaves, pairs, strict=True):
            self.add_module(leaf, pair)
        self.dropout = nn.Dropout(dropout) if dropout else None
        self.kept = 1 - dropout
        self._num_experts = experts.gate_up_proj.num_experts
        self._width, self._inner = experts.gate_up_proj.in_features, experts.down_proj.in_features

    def pairs(self) -> list[ExpertLowRank]:
        """The pairs in the order of the layer's rows."""
        return [cast(ExpertLowRank, getattr(self, leaf)) for leaf in self.leaves]

    def slots(self, x: Tensor) -> None:
        """As `ExpertsAdapterProtocol.slots`: all tokens have the same adapters."""

    def forward(self, x: Tensor) -> Factors:
        """What the kernel adds, for the input x [T, D]."""
        up = self._factors("gate_up_proj", x, 2 * self._inner, self._width)
        down = self._factors("down_proj", x, self._width, self._inner)
        is_dropped = self.training and self.dropout is not None
        dropped = self.dropout(x) if is_dropped and self.dropout is not None else None
        return Factors(*up, *down, x=dropped, kept=self.kept if is_dropped else 1.0)

    def _factors(self, projection: str, x: Tensor, out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
        """A [E, R, in] and B [E, out, R], R a multiple of RANK_MULTIPLE; 0 without an adapter on the projection."""
        pairs = [pair for pair in self.pairs() if pair.projection == projection]
        if not pairs:
            empty = x.new_empty(self._num_experts, 0, in_features)
            return empty, x.new_empty(self._num_experts, out_features, 0)
        downs, ups = zip(*(pair.stacked(x.dtype) for pair in pairs), strict=True)
        down, up = join_parts(downs, ups, [(pair.start, pair.stop) for pair in pairs], out_features)
        missing = -down.shape[1] % RANK_MULTIPLE
        return (F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, missing))) if missing else (down, up)


def fold_expert_pair_(rows: Tensor, pair: ExpertLowRank, a: Tensor, b: Tensor, block: int, first: int) -> None:
    """Merge the adapters of one projection into rows of its experts.

    Args:
        rows: [N, I], rows of the weight from `first` on.
        a, b: [E * R, I] and [E * P, R], in the dtype of the rows.
        block: the rows of one expert in the weight.
    """
    width = pair.stop - pair.start
    for expert in range(len(pair.held)):
        begin = expert * block + pair.start
        start, stop = max(begin, first), min(begin + width, first + len(rows))
        if start < stop:
            offset = expert * width - begin
            rows[start - first : stop - first].addmm_(
                b[start + offset : stop + offset], a[expert * pair.rank : (expert + 1) * pair.rank], alpha=pair.scale
            )
