"""The taps of a causal convolution of each channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from xorl.core.nn.roles import Role
from xorl.core.nn.share import Share
from xorl.core.nn.tensor import TensorRanks


class DepthwiseConv(nn.Module):
    """The taps [C, 1, W] of a causal convolution, for channels that are stacked by `counts`, and perhaps a bias [C].

    Attributes:
        shares: what it holds of the parameters, if ranks share them.
    """

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType({"weight": "taps", "bias": "bias"})

    def __init__(self, counts: Sequence[int], num_taps: int, ranks: TensorRanks, *, bias: bool) -> None:
        super().__init__()
        num_channels = sum(map(ranks.num_of, counts))
        self.weight = nn.Parameter(torch.empty(num_channels, 1, num_taps))
        self.bias = nn.Parameter(torch.empty(num_channels)) if bias else None
        share = ranks.rows_of(counts)
        names = ("weight", "bias") if bias else ("weight",)
        self.shares: Mapping[str, Share] = {} if share is None else dict.fromkeys(names, share)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """The taps [C, W], and the bias."""
        return self.weight.squeeze(1), self.bias
