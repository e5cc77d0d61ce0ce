"""Norm modules, which compute in fp32 and return the dtype of their input.

Shapes: T tokens, D model width, H heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xorl.core.nn.kernels import LayerKernels
from xorl.core.nn.roles import Role
from xorl.core.nn.share import Share
from xorl.kernels.arguments import check_choice, check_number


@dataclass(frozen=True)
class NormConfig:
    """The norms of a model.

    Attributes:
        kind: rms, or layer, which subtracts the mean.
        offset: added to the weight; with 1, an initial weight is 0.
        bias: of a layer norm.
    """

    kind: Literal["rms", "layer"]
    eps: float
    offset: float = 0.0
    bias: bool = False

    def __post_init__(self) -> None:
        check_choice("norm.kind", self.kind, Literal["rms", "layer"])
        check_number("norm.eps", self.eps)
        if not self.eps:
            raise ValueError("norm.eps: is 0, so that a norm might divide by 0; use one above 0, such as 1e-6")


class _RMSWeight(nn.Module):
    """The weight of an RMS norm over `num_channels` channels."""

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType({"weight": "norm"})

    def __init__(self, num_channels: int, config: NormConfig) -> None:
        super().__init__()
        self.eps, self.offset = config.eps, config.offset
        self.weight = nn.Parameter(torch.empty(num_channels))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, offset={self.offset}"


class RMSNorm(_RMSWeight):
    """(x, x / rms(x) * (weight + offset)) over the last dimension, in the dtype of x (arXiv:1910.07467).

    With a residual, (residual + x, the norm of this sum). Use the first output as the new residual stream: the norm's
    kernel then sums the gradients of both outputs.
    """

    def __init__(self, width: int, config: NormConfig, kernels: LayerKernels) -> None:
        super().__init__(width, config)
        self.kernels = kernels

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps, self.offset)


class HeadNorm(_RMSWeight):
    """The weight of an RMS norm of each head. It has no forward: attention reads the weight and may fuse the norm."""


class NormOfHeads(_RMSWeight):
    """An RMS norm of all heads together, [T, H * C] -> [T, H * C]. Ranks may share the heads.

    Attributes:
        shares: what it holds of the weight, if ranks share it.
    """

    def __init__(self, width: int, head_dim: int, config: NormConfig, kernels: LayerKernels) -> None:
        ranks = kernels.tensor
        super().__init__(ranks.num_of(width, head_dim), config)
        self.ranks, self.norm = ranks, kernels.norm
        share = ranks.rows_of([width], head_dim)
        self.shares: Mapping[str, Share] = {} if share is None else {"weight": share}

    def forward(self, x: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return self.norm(x, self.weight, self.eps, self.offset)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # Where several ranks have the same heads, all of them count.
        num_counted = self.ranks.size * x.shape[-1]
        mean = self.ranks.sum(wide.square().sum(-1, keepdim=True)) / num_counted  # [T, 1]
        weight = self.weight.to(x.dtype).to(wide.dtype) + self.offset
        return (wide * (mean + self.eps).rsqrt() * weight).to(x.dtype)


class LayerNorm(nn.Module):
    """(x, (x - mean) / std * weight + bias) over the last dimension, in the dtype of x.

    With a residual, returns (residual + x, the norm of this sum).
    """

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType({"weight": "norm", "bias": "bias"})

    def __init__(self, width: int, config: NormConfig) -> None:
        super().__init__()
        self.eps, self.offset = config.eps, config.offset
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if config.bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        summed = x if residual is None else residual + x
        # Cast to fp32 explicitly: the CPU kernel would sum the gradient of a half-precision weight in half precision.
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(x.dtype).to(wide)
        bias = None if self.bias is None else self.bias.to(x.dtype).to(wide)
        return summed, F.layer_norm(summed.to(wide), self.weight.shape, weight, bias, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def unweighted_norm(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, computed in fp32 at least, in the dtype of x."""
    return F.rms_norm(x.to(torch.promote_types(x.dtype, torch.float32)), x.shape[-1:], eps=eps).to(x.dtype)


def make_norm(width: int, config: NormConfig, kernels: LayerKernels) -> RMSNorm | LayerNorm:
    """The norm that a configuration describes."""
    return RMSNorm(width, config, kernels) if config.kind == "rms" else LayerNorm(width, config)
