"""Adapters on the experts of a layer: a pair of factors for each expert, some of which all experts may share.

Shapes: E experts that this rank holds, T tokens, I input features, P output features of a projection, R rank, D model
width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xorl.core.nn.moe import ExpertLinear, Experts
from xorl.core.nn.roles import Role
from xorl.core.nn.share import Share
from xorl.kernels.experts.adapted import Factors
from xorl.lora.linear import Leaf, LowRank, join_parts
from xorl.lora.spec import ExpertSharing

# The grouped products of a GPU need rows of 16 bytes.
RANK_MULTIPLE = 8


# By what experts share and the module of a projection: which of its factors are shared. None if it is not here.
SHARED: Mapping[tuple[ExpertSharing, str], Collection[Leaf]] = MappingProxyType(
    {
        ("outer", "gate_up_proj"): ("A",),
        ("outer", "down_proj"): ("B",),
        ("all", "gate_up_proj"): ("A", "B"),
        ("all", "down_proj"): ("A", "B"),
    }
)


class SharedPair(nn.Module):
    """The factors of one projection that all experts share: A [R, I] or B [P, R], or both. The other is None."""

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType({"A": "adapter", "B": "adapter"})


class ExpertLowRank(LowRank):
    """The adapters on one projection of all experts. A is [E * R, I] and B [E * P, R]: the rows of each are adjacent.

    A factor that the experts share is None here and a parameter of `shared_pair`, which another module owns.

    Attributes:
        projection: the name of the module in `Experts` that stores the projection.
        members: the names of the experts' layers in checkpoints, of those on other ranks too.
        held: the indices in `members` of the experts that this rank holds.
        num_active: experts that a token goes to.
        start, stop: the projection's rows among those of one expert in that module.
        sharing: what the experts share.
        shared: the leaves A and B that they share.
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
        sharing: ExpertSharing,
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
        self.sharing: ExpertSharing = sharing
        self.shared = SHARED.get((sharing, projection), ())
        pair = SharedPair()
        for leaf, shape in self._shapes(in_features).items():
            shared = nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=device))
            own = nn.Parameter(torch.empty(len(self.held) * shape[0], shape[1], dtype=torch.float32, device=device))
            pair.register_parameter(leaf, shared if leaf in self.shared else None)
            self.register_parameter(leaf, None if leaf in self.shared else own)
        # In a tuple, because another module owns it and its parameters.
        self._shared_pair = (pair,)
        self.shares: Mapping[str, Share] = {}
        if layer.shares:
            axes = layer.shares["weight"].divided_over
            self.shares = {
                leaf: Share(len(members) * rows, ((self.held.start * rows, self.held.stop * rows),), axes)
                for leaf, (rows, _) in self._shapes(in_features).items()
                if leaf not in self.shared
            }

    def _shapes(self, in_features: int) -> dict[Leaf, tuple[int, int]]:
        """The shapes of the factors of one expert."""
        return {"A": (self.rank, in_features), "B": (self.stop - self.start, self.rank)}

    @property
    def shared_pair(self) -> SharedPair:
        """The factors that the experts share."""
        return self._shared_pair[0]

    def factor(self, leaf: Leaf) -> nn.Parameter:
        """The parameter A or B: [R, I] and [P, R] if the experts share it, else [E * R, I] and [E * P, R]."""
        return cast(nn.Parameter, getattr(self.shared_pair if leaf in self.shared else self, leaf))

    def set_factor(self, leaf: Leaf, value: nn.Parameter) -> None:
        """Replace the parameter A or B."""
        setattr(self.shared_pair if leaf in self.shared else self, leaf, value)

    def count(self, leaf: Leaf) -> int:
        """How many matrices A or B of this rank stacks: E, or 1 if the experts share it."""
        return 1 if leaf in self.shared else len(self.held)

    @property
    def matrix_rows(self) -> Mapping[str, Sequence[int]]:
        """The rows of each expert's matrix in A and B, for optimizers that treat matrices separately."""
        count, rows = len(self.held), {"A": self.rank, "B": self.stop - self.start}
        return {leaf: (rows[leaf],) * count for leaf in rows if leaf not in self.shared}

    @property
    def held_members(self) -> Sequence[str]:
        """The names of the layers that this rank holds."""
        return self.members[self.held.start : self.held.stop]

    def stacked(self, dtype: torch.dtype, shared: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """scale * A [E, R, I] and B [E, P, R] in `dtype`; a factor that the experts share is [1, ...]."""
        a = shared[f"{self.name}.A"] if "A" in self.shared else self.A.to(dtype)
        b = shared[f"{self.name}.B"] if "B" in self.shared else self.B.to(dtype)
        return self.scaled(a).unflatten(0, (self.count("A"), -1)), b.unflatten(0, (self.count("B"), -1))


class SharedFactors(nn.Module):
    """The factors of the adapters of a layer that all of its experts share; each child is of one projection."""

    def __init__(self, pairs: Sequence[ExpertLowRank]) -> None:
        super().__init__()
        self._names = {pair.name.rpartition(".")[2]: pair.name for pair in pairs if pair.shared}
        for pair in pairs:
            if pair.shared:
                self.add_module(pair.name.rpartition(".")[2], pair.shared_pair)

    def forward(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The factors in `dtype`, by the name of the projection and A or B."""
        return {
            f"{self._names[child]}.{leaf}": parameter.to(dtype)
            for child, pair in self.named_children()
            for leaf, parameter in pair.named_parameters(recurse=False)
        }


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

    def forward(self, x: Tensor, shared: Mapping[str, Tensor]) -> Factors:
        """What the kernel adds, for the input x [T, D] and the factors that `SharedFactors` returns."""
        up = self._factors("gate_up_proj", x, shared, 2 * self._inner, self._width)
        down = self._factors("down_proj", x, shared, self._width, self._inner)
        is_dropped = self.training and self.dropout is not None
        dropped = self.dropout(x) if is_dropped and self.dropout is not None else None
        return Factors(*up, *down, x=dropped, kept=self.kept if is_dropped else 1.0)

    def _factors(
        self, projection: str, x: Tensor, shared: Mapping[str, Tensor], out_features: int, in_features: int
    ) -> tuple[Tensor, Tensor]:
        """A [E, R, in] and B [E, out, R], R a multiple of RANK_MULTIPLE; 0 without an adapter on the projection.

        A factor that all experts share is [1, ...].
        """
        pairs = [pair for pair in self.pairs() if pair.projection == projection]
        if not pairs:
            empty = x.new_empty(self._num_experts, 0, in_features)
            return empty, x.new_empty(self._num_experts, out_features, 0)
        downs, ups = zip(*(pair.stacked(x.dtype, shared) for pair in pairs), strict=True)
        down, up = join_parts(downs, ups, [(pair.start, pair.stop) for pair in pairs], out_features)
        missing = -down.shape[1] % RANK_MULTIPLE
        return (F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, missing))) if missing else (down, up)


def fold_expert_pair_(rows: Tensor, pair: ExpertLowRank, a: Tensor, b: Tensor, block: int, first: int) -> None:
    """Merge the adapters of one projection into rows of its experts.

    Args:
        rows: [N, I], rows of the weight from `first` on.
        a, b: [E * R, I] and [E * P, R], or [R, I] and [P, R] if the experts share it, in the dtype of the rows.
        block: the rows of one expert in the weight.
    """
    width, rank = pair.stop - pair.start, pair.rank
    for expert in range(len(pair.held)):
        begin = expert * block + pair.start
        start, stop = max(begin, first), min(begin + width, first + len(rows))
        if start < stop:
            a_index, b_index = (0 if leaf in pair.shared else expert for leaf in ("A", "B"))
            offset = b_index * width - begin
            rows[start - first : stop - first].addmm_(
                b[start + offset : stop + offset], a[a_index * rank : (a_index + 1) * rank], alpha=pair.scale
            )
