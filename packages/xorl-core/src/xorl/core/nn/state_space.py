"""A mixer of Mamba-2: a layer whose heads keep a decaying state, written and read by group (arXiv:2405.21060).

Shapes: T tokens, D model width, H heads of P channels, G groups of heads, N channels of a group's states, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xorl.core.nn.depthwise import DepthwiseConv
from xorl.core.nn.kernels import LayerKernels
from xorl.core.nn.layers import Linear
from xorl.core.nn.roles import InitialValue, LogUniform, Role, SoftplusLogUniform
from xorl.core.nn.share import Share
from xorl.core.nn.tensor import TensorRanks
from xorl.core.nn.ulysses import columns_of_all_tokens, tokens_of_all_columns
from xorl.kernels.fused import RopeTables
from xorl.kernels.layout import RankGroup, SequenceLayout, ShardedLayout
from xorl.kernels.recurrent import over_cache


@dataclass(frozen=True)
class StateSpaceConfig:
    """A mixer of Mamba-2 of one layer.

    Attributes:
        num_heads, num_groups: each group serves as many neighbouring heads as any other; the norm of the output is over
            the channels of the heads of a group.
        head_dim: P.
        state_dim: N.
        num_taps: of the convolution, the token itself included.
        bias: of the projections.
        conv_bias: of the convolution.
        min_step, max_step: the bounds of step sizes.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    num_taps: int
    bias: bool = False
    conv_bias: bool = True
    min_step: float = 0.0
    max_step: float = math.inf

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"the number of heads of a state space ({self.num_heads}) must be a multiple of the number of its "
                f"groups ({self.num_groups})"
            )
        if not self.min_step < self.max_step:
            raise ValueError(f"step sizes from {self.min_step} to {self.max_step}: the first must be below the second")

    @property
    def width(self) -> int:
        """The channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def mixed_counts(self) -> tuple[int, int, int]:
        """The channels of x, b and c, which the convolution mixes."""
        return self.width, self.num_groups * self.state_dim, self.num_groups * self.state_dim

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Output features of the projections of gates, x, b, c and step sizes."""
        return self.width, *self.mixed_counts, self.num_heads

    @property
    def num_parts(self) -> int:
        """The parts that ranks which share matrices can have: groups, with their heads."""
        return self.num_groups

    @property
    def num_row_parts(self) -> int:
        """The parts that ranks which share a row can have: groups with their heads, or heads of one group."""
        return self.num_groups if self.num_groups > 1 else self.num_heads

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the states of one sequence: the last inputs of the convolution, and the states of heads."""
        return (self.num_taps - 1, sum(self.mixed_counts)), (self.num_heads, self.state_dim, self.head_dim)

    @property
    def rotary(self) -> None:
        """The rotary embedding: none."""
        return

    def num_parameters(self, width: int) -> int:
        """The number of elements of its matrices, in a model of this width."""
        return width * (sum(self.row_counts) + self.width)

    @property
    def num_products(self) -> int:
        """Multiply-adds for each token without a matrix of parameters.

        For each head, an outer product is added to the state, and another vector multiplies it.
        """
        return 2 * self.num_heads * self.head_dim * self.state_dim + sum(self.mixed_counts) * self.num_taps


class StateSpace(nn.Module):
    """A mixer of Mamba-2 over a packed row; [T, D] -> [T, D].

    Ranks that share its matrices have [T / R, D] each, and compute all tokens of their share of the groups.

    Args:
        width: D.
        config: the numbers of heads and groups are those of all ranks that share the matrices.
        eps: of the norm of the output.
        kernels: the functions that compute everything but the projections.
    """

    def __init__(self, width: int, config: StateSpaceConfig, eps: float, *, kernels: LayerKernels) -> None:
        super().__init__()
        self.ranks = ranks = kernels.tensor
        self.kernels = kernels.recurrence
        self.config = config
        self.in_proj = Linear.column_parallel(width, config.row_counts, bias=config.bias, ranks=ranks)
        self.conv1d = DepthwiseConv(config.mixed_counts, config.num_taps, ranks, bias=config.conv_bias)
        self.decay = StepSizes(config, ranks)
        self.norm = NormOfGated(config.width, eps, ranks)
        self.out_proj = Linear.row_parallel(config.width, width, bias=config.bias, ranks=ranks)

    @property
    def stacked_rows(self) -> Mapping[str, Sequence[int]]:
        """By name of each projection that stacks several matrices: the number of rows of each of them."""
        return {"in_proj": self._held(self.config.row_counts)}

    def _held(self, counts: Sequence[int]) -> tuple[int, ...]:
        return tuple(count // self.ranks.size for count in counts)

    def forward(self, x: Tensor, layout: SequenceLayout, rope: RopeTables | None = None) -> Tensor:
        mixed_counts = self._held(self.config.mixed_counts)
        gate, *mixed, dt = self.in_proj(self.ranks.gather(x)).split(self._held(self.config.row_counts), dim=-1)
        taps, bias = self.conv1d()
        taps = taps.to(x.dtype)
        if isinstance(layout, ShardedLayout):
            if layout.ring.size > 1:
                raise ValueError("layout: a state space cannot be computed in a ring; use Ulysses alone")
            group = layout.ulysses
            *mixed, dt = columns_of_all_tokens([*self._for_all(mixed, group, dim=1), dt], group)
            taps, bias = (None if each is None else self._own(each.split(mixed_counts), group) for each in (taps, bias))
            assert taps is not None, "it is a tensor"
            out = self._mix(torch.cat(mixed, dim=-1), dt, taps, bias, layout.whole, group)
            out = tokens_of_all_columns(out, group)
        else:
            out = self._mix(torch.cat(mixed, dim=-1), dt, taps, bias, layout, RankGroup(0, 1, ""))
        num_groups = self.config.num_groups // self.ranks.size
        out, gate, weight = (each.unflatten(-1, (num_groups, -1)) for each in (out, gate, self.norm.weight.to(x.dtype)))
        return self.ranks.scatter(
            self.out_proj(self.kernels.norm_of_gated(out, weight, gate, self.norm.eps).flatten(1))
        )

    def _for_all(self, parts: Sequence[Tensor], group: RankGroup, dim: int) -> list[Tensor]:
        """The channels of x, b and c in dimension `dim`, with one group for each rank at least."""
        x, *others = parts
        num_groups = self.config.num_groups // self.ranks.size
        times = max(1, group.size // num_groups)
        groups = [each.unflatten(dim, (num_groups, -1)).repeat_interleave(times, dim) for each in others]
        return [x, *(each.flatten(dim, dim + 1) for each in groups)]

    def _own(self, parts: Sequence[Tensor], group: RankGroup) -> Tensor:
        """What belongs to this rank's heads, of parameters of the channels of x, b and c."""
        return torch.cat([part.chunk(group.size)[group.rank] for part in self._for_all(parts, group, dim=0)])

    def _mix(
        self, mixed: Tensor, dt: Tensor, taps: Tensor, bias: Tensor | None, layout: SequenceLayout, group: RankGroup
    ) -> Tensor:
        """The output [T, H * P] for the heads of one rank of a row, before its norm.

        The layout is of whole documents, or has a cache.
        """
        head_dim, state_dim = self.config.head_dim, self.config.state_dim
        num_channels = dt.shape[-1] * head_dim
        num_states = (mixed.shape[-1] - num_channels) // 2
        kernels = over_cache(self.kernels, layout)
        mixed = kernels.causal_conv(mixed, taps, bias, "silu", layout)
        x, b, c = mixed.split([num_channels, num_states, num_states], dim=-1)
        dt, a, d = self.decay(dt, group.rank, group.size)
        b, c = (each.unflatten(-1, (-1, state_dim)) for each in (b, c))
        return kernels.state_space(x.unflatten(-1, (-1, head_dim)), dt, a, b, c, d, layout).flatten(-2)


class StepSizes(nn.Module):
    """The step sizes [T, H], softplus(dt + dt_bias) within bounds, and by head -exp(A_log) [H] and D [H], in fp32.

    Its parameters are few, and the decays of long documents depend on their last digits: they stay in fp32, as a
    sharding unit of their own.

    Attributes:
        shares: what it holds of the parameters, if ranks share them.
    """

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType(dict.fromkeys(("A_log", "dt_bias", "D"), "recurrence"))
    # Those of the authors.
    initial_values: ClassVar[Mapping[str, InitialValue]] = MappingProxyType(
        {"A_log": LogUniform(1.0, 16.0), "dt_bias": SoftplusLogUniform(1e-3, 1e-1), "D": 1.0}
    )

    def __init__(self, config: StateSpaceConfig, ranks: TensorRanks) -> None:
        super().__init__()
        self.bounds = config.min_step, config.max_step
        held = ranks.num_of(config.num_heads)
        self.A_log, self.dt_bias, self.D = (nn.Parameter(torch.empty(held, dtype=torch.float32)) for _ in range(3))
        share = ranks.rows_of([config.num_heads])
        self.shares: Mapping[str, Share] = {} if share is None else dict.fromkeys(self.roles, share)

    def forward(self, dt: Tensor, part: int, num_parts: int) -> tuple[Tensor, Tensor, Tensor]:
        """dt: of the heads of one of `num_parts` equal parts."""
        wide = torch.promote_types(dt.dtype, torch.float32)
        # Copies, because the memory of gathered parameters is freed afterwards.
        a_log, bias, d = (
            each.to(wide, copy=True).chunk(num_parts)[part] for each in (self.A_log, self.dt_bias, self.D)
        )
        return F.softplus(dt.to(wide) + bias).clamp(*self.bounds), -a_log.exp(), d


class NormOfGated(nn.Module):
    """The weight of the norm of the gated output. It has no forward: the layer reads the weight.

    Attributes:
        shares: what it holds of the weight, if ranks share it.
    """

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType({"weight": "norm"})
    initial_values: ClassVar[Mapping[str, InitialValue]] = MappingProxyType({"weight": 1.0})

    def __init__(self, num_channels: int, eps: float, ranks: TensorRanks) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(ranks.num_of(num_channels)))
        share = ranks.rows_of([num_channels])
        self.shares: Mapping[str, Share] = {} if share is None else {"weight": share}
