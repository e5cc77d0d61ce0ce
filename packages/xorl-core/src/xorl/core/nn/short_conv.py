"""A gated short convolution: a layer that mixes each channel of a few neighbouring tokens (arXiv:2511.23404).

Shapes: T tokens, D model width, W taps, P ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from xorl.core.nn.depthwise import DepthwiseConv
from xorl.core.nn.kernels import LayerKernels
from xorl.core.nn.layers import Linear
from xorl.core.nn.ulysses import columns_of_all_tokens, tokens_of_all_columns
from xorl.kernels.fused import RopeTables
from xorl.kernels.layout import SequenceLayout, ShardedLayout
from xorl.kernels.recurrent import over_cache


@dataclass(frozen=True)
class ShortConvConfig:
    """A gated short convolution of one layer.

    Attributes:
        num_channels: the width of the model.
        num_taps: of the convolution, the token itself included.
        bias: of the projections and of the convolution.
    """

    num_channels: int
    num_taps: int
    bias: bool

    @property
    def num_parts(self) -> int:
        """The parts that ranks which share matrices can have: channels."""
        return self.num_channels

    @property
    def num_row_parts(self) -> int:
        """The parts that ranks which share a row can have."""
        return self.num_parts

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the states of one sequence: the last inputs of the convolution."""
        return ((self.num_taps - 1, self.num_channels),)

    @property
    def rotary(self) -> None:
        """The rotary embedding: none."""
        return

    def num_parameters(self, width: int) -> int:
        """The number of elements of its matrices, in a model of this width."""
        return 4 * self.num_channels * width

    @property
    def num_products(self) -> int:
        """Multiply-adds for each token without a matrix of parameters: those of the convolution."""
        return self.num_channels * self.num_taps


class ShortConv(nn.Module):
    """c * convolution(b * x), of three projections of a packed row; [T, D] -> [T, D].

    Ranks that share its matrices have [T / P, D] each, and compute all tokens of their share of the channels.
    """

    def __init__(self, width: int, config: ShortConvConfig, *, kernels: LayerKernels) -> None:
        super().__init__()
        self.ranks = ranks = kernels.tensor
        self.kernels = kernels.recurrence
        counts = (config.num_channels,) * 3
        self.in_proj = Linear.column_parallel(width, counts, bias=config.bias, ranks=ranks)
        self.conv = DepthwiseConv(counts[:1], config.num_taps, ranks, bias=config.bias)
        self.out_proj = Linear.row_parallel(config.num_channels, width, bias=config.bias, ranks=ranks)

    @property
    def stacked_rows(self) -> Mapping[str, Sequence[int]]:
        """By name of each projection that stacks several matrices: the number of rows of each of them."""
        return {"in_proj": (self.in_proj.out_features // 3,) * 3}

    def forward(self, x: Tensor, layout: SequenceLayout, rope: RopeTables | None = None) -> Tensor:
        b, c, x = self.in_proj(self.ranks.gather(x)).chunk(3, dim=-1)
        taps, bias = self.conv()
        bx, taps = b * x, taps.to(x.dtype)
        if isinstance(layout, ShardedLayout):
            if layout.ring.size > 1:
                raise ValueError("layout: a short convolution cannot be computed in a ring; use Ulysses alone")
            group = layout.ulysses
            (bx,) = columns_of_all_tokens((bx,), group)
            taps = taps.chunk(group.size)[group.rank]
            bias = None if bias is None else bias.chunk(group.size)[group.rank]
            mixed = tokens_of_all_columns(self.kernels.causal_conv(bx, taps, bias, None, layout.whole), group)
        else:
            mixed = over_cache(self.kernels, layout).causal_conv(bx, taps, bias, None, layout)
        return self.ranks.scatter(self.out_proj(c * mixed))
