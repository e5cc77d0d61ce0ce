"""A gated delta net: a layer whose heads keep a matrix as their state, instead of keys and values (arXiv:2412.06464).

Shapes: T tokens, D model width, G key heads, H value heads, K and V channels of their heads, P ranks.
"""

from __future__ import annotations

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
from xorl.core.nn.roles import InitialValue, LogUniform, Role
from xorl.core.nn.share import Share
from xorl.core.nn.tensor import TensorRanks
from xorl.core.nn.ulysses import columns_of_all_tokens, tokens_of_all_columns
from xorl.kernels.fused import RopeTables
from xorl.kernels.layout import SequenceLayout, ShardedLayout
from xorl.kernels.recurrent import over_cache

# The distribution of initial decays of a token, exp(-A * softplus(a + 1)), as A.
_INITIAL_DECAYS = LogUniform(0.01, 16.0)


@dataclass(frozen=True)
class GatedDeltaConfig:
    """A gated delta net of one layer.

    Attributes:
        num_key_heads: of queries and keys; each serves num_value_heads / num_key_heads adjacent value heads.
        num_value_heads: of values, states, decays and gates.
        key_dim, value_dim: the channels of a head.
        num_taps: of the convolution of queries, keys and values, the token itself included.
        by_key_head: whether projections stack queries, keys, values and gates by key head, in two matrices.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int
    by_key_head: bool = False

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"the number of value heads of a recurrence ({self.num_value_heads}) must be a multiple of the number "
                f"of its key heads ({self.num_key_heads})"
            )

    @property
    def row_counts(self) -> tuple[int, int, int]:
        """Output features of the projections of queries, keys and values."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def num_parts(self) -> int:
        """The parts that ranks which share matrices can have: key heads, with their value heads."""
        return self.num_key_heads

    @property
    def num_row_parts(self) -> int:
        """The parts that ranks which share a row can have."""
        return self.num_parts

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the states of one sequence: the last inputs of the convolution, and the states of heads."""
        heads = self.num_value_heads, self.key_dim, self.value_dim
        return (self.num_taps - 1, sum(self.row_counts)), heads

    @property
    def rotary(self) -> None:
        """The rotary embedding: none."""
        return

    def num_parameters(self, width: int) -> int:
        """The number of elements of its matrices, in a model of this width."""
        *_, values = self.row_counts
        return width * (sum(self.row_counts) + 2 * values + 2 * self.num_value_heads)

    @property
    def num_products(self) -> int:
        """Multiply-adds for each token without a matrix of parameters.

        For each head, the state multiplies a key and a query, and the outer product of a key and an update is added.
        """
        return 3 * self.num_value_heads * self.key_dim * self.value_dim + sum(self.row_counts) * self.num_taps


class GatedDeltaNet(nn.Module):
    """The gated delta rule over a packed row; [T, D] -> [T, D].

    Queries, keys and values pass a causal convolution. Ranks that share its matrices have [T / P, D] each, and compute
    all tokens of their share of the heads.

    Args:
        width: D.
        config: the numbers of heads are those of all ranks that share the matrices, whose number divides them.
        eps: of the norm of the output.
        kernels: the functions that compute everything but the projections.
    """

    def __init__(self, width: int, config: GatedDeltaConfig, eps: float, *, kernels: LayerKernels) -> None:
        super().__init__()
        self.ranks = ranks = kernels.tensor
        self.kernels = kernels.recurrence
        self.config = config
        counts, num_heads = config.row_counts, config.num_value_heads

        def project(*counts: int) -> Linear:
            return Linear.column_parallel(width, counts, bias=False, ranks=ranks)

        if config.by_key_head:
            self.in_proj_qkvz = project(sum(counts) + counts[2])
            self.in_proj_ba = project(2 * num_heads)
        else:
            self.in_proj_qkv = project(*counts)
            self.in_proj_z = project(counts[2])
            self.in_proj_b = project(num_heads)
            self.in_proj_a = project(num_heads)
        self.conv1d = DepthwiseConv(counts, config.num_taps, ranks, bias=False)
        self.decay = Decay(num_heads, ranks)
        self.norm = GatedNorm(config.value_dim, eps)
        self.out_proj = Linear.row_parallel(counts[2], width, bias=False, ranks=ranks)

    @property
    def stacked_rows(self) -> Mapping[str, Sequence[int]]:
        """By name of each projection that stacks several matrices: the number of rows of each of them."""
        return {} if self.config.by_key_head else {"in_proj_qkv": self._row_counts}

    @property
    def _row_counts(self) -> tuple[int, ...]:
        return tuple(count // self.ranks.size for count in self.config.row_counts)

    def forward(self, x: Tensor, layout: SequenceLayout, rope: RopeTables | None = None) -> Tensor:
        qkv, z, b, a = self._project(self.ranks.gather(x))
        weight = self.conv1d()[0].to(x.dtype)
        if isinstance(layout, ShardedLayout):
            if layout.ring.size > 1:
                raise ValueError("layout: a gated delta net cannot be computed in a ring; use Ulysses alone")
            group, counts = layout.ulysses, self._row_counts
            *qkv, b, a = columns_of_all_tokens((*qkv.split(counts, dim=-1), b, a), group)
            weight = torch.cat([part.chunk(group.size)[group.rank] for part in weight.split(counts)])
            g = self.decay(a, group.rank, group.size)
            out = tokens_of_all_columns(self._mix(torch.cat(qkv, dim=-1), b, g, weight, layout.whole), group)
        else:
            out = self._mix(qkv, b, self.decay(a), weight, layout)
        out = self.kernels.gated_norm(self._heads(out), self.norm.weight.to(x.dtype), self._heads(z), self.norm.eps)
        return self.ranks.scatter(self.out_proj(out.flatten(-2)))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values [T, (2G * K + H * V)], z [T, H * V], b and a [T, H]."""
        if not self.config.by_key_head:
            return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        key_dim, ratio = self.config.key_dim, self.config.num_value_heads // self.config.num_key_heads
        values = ratio * self.config.value_dim
        by_head = self.in_proj_qkvz(x).unflatten(-1, (-1, 2 * key_dim + 2 * values))  # [T, G, ..]
        *qkv, z = (part.flatten(1) for part in by_head.split([key_dim, key_dim, values, values], dim=-1))
        b, a = (part.flatten(1) for part in self.in_proj_ba(x).unflatten(-1, (-1, 2 * ratio)).split(ratio, dim=-1))
        return torch.cat(qkv, dim=-1), z, b, a

    def _mix(self, qkv: Tensor, b: Tensor, g: Tensor, weight: Tensor, layout: SequenceLayout) -> Tensor:
        """The output [T, H * V] for some heads, before its norm. The layout is of whole documents, or has a cache."""
        config, num_heads = self.config, b.shape[-1]
        keys = num_heads * config.num_key_heads // config.num_value_heads * config.key_dim
        kernels = over_cache(self.kernels, layout)
        mixed = kernels.causal_conv(qkv, weight, None, "silu", layout)
        q, k, v = mixed.split([keys, keys, num_heads * config.value_dim], dim=-1)
        q, k = (
            kernels.unit_norm(x.unflatten(-1, (-1, config.key_dim)), scale)
            for x, scale in ((q, config.key_dim**-0.5), (k, 1.0))
        )
        return kernels.gated_delta(q, k, self._heads(v), g, b.to(g.dtype).sigmoid(), layout).flatten(-2)

    def _heads(self, x: Tensor) -> Tensor:
        """[T, H, V]."""
        return x.unflatten(-1, (-1, self.config.value_dim))


class Decay(nn.Module):
    """The logarithms of decays, -exp(A_log) * softplus(a + dt_bias), in fp32: [T, H] -> [T, H].

    Its parameters are few, and the decays of long documents depend on their last digits: they stay in fp32, as a
    sharding unit of their own.

    Attributes:
        shares: what it holds of the parameters, if ranks share them.
    """

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType({"A_log": "recurrence", "dt_bias": "recurrence"})
    initial_values: ClassVar[Mapping[str, InitialValue]] = MappingProxyType({"A_log": _INITIAL_DECAYS, "dt_bias": 1.0})

    def __init__(self, num_heads: int, ranks: TensorRanks) -> None:
        super().__init__()
        held = ranks.num_of(num_heads)
        self.A_log = nn.Parameter(torch.empty(held, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(held, dtype=torch.float32))
        share = ranks.rows_of([num_heads])
        self.shares: Mapping[str, Share] = {} if share is None else dict.fromkeys(("A_log", "dt_bias"), share)

    def forward(self, a: Tensor, part: int = 0, num_parts: int = 1) -> Tensor:
        """a: of the heads of one of `num_parts` equal parts."""
        wide = torch.promote_types(a.dtype, torch.float32)
        a_log, bias = (each.to(wide).chunk(num_parts)[part] for each in (self.A_log, self.dt_bias))
        return -a_log.exp() * F.softplus(a.to(wide) + bias)


class GatedNorm(nn.Module):
    """The weight of the norm of each head of values. It has no forward: the layer reads the weight."""

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType({"weight": "norm"})
    initial_values: ClassVar[Mapping[str, InitialValue]] = MappingProxyType({"weight": 1.0})

    def __init__(self, num_channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(num_channels))
