"""Quantised weights of experts, which the operators of a layer dequantise where they use them.

Shapes: E experts, O output and I input features of a projection.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from xorl.kernels.quant import QuantFormat, QuantizedWeight, QuantScheme, dequantized
from xorl.kernels.quant.products import num_columns


class QuantizedExperts(NamedTuple):
    """The frozen weights of one projection of all experts, as rows of one matrix.

    weight: of [E * O, I], as `scheme` stores it.
    num_rows: E * O.
    noise: None, or the `key_and_step` of a WeightNoise.
    noise_alpha: the `alpha` of that noise.
    """

    weight: QuantizedWeight
    scheme: QuantScheme
    num_rows: int
    noise: Tensor | None = None
    noise_alpha: float = 0.0

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weights [E * O, I] in `dtype`."""
        scheme = self.scheme.quant_format, self.scheme.group_size
        return dequantized(*self.weight, *scheme, self.num_rows, dtype, self.noise, self.noise_alpha)

    def tensors(self) -> list[Tensor]:
        """All tensors, in the form of an operator's arguments; `of_tensors` reverses it."""
        found = [*self.weight, self.noise]
        return [self.weight.codes.new_empty(0) if tensor is None else tensor for tensor in found]

    @classmethod
    def of_tensors(cls, tensors: list[Tensor], quant_format: str, num_rows: int, noise_alpha: float) -> QuantizedExperts:
        """The weights whose `tensors` these are."""
        codes, scales, global_scale, noise = (tensor if tensor.numel() else None for tensor in tensors)
        assert codes is not None
        assert scales is not None
        size = codes.shape[1] if quant_format == "block_fp8" else num_columns(codes, quant_format) // scales.shape[1]
        scheme = QuantScheme(cast(QuantFormat, quant_format), size)
        return cls(QuantizedWeight(codes, scales, global_scale), scheme, num_rows, noise, noise_alpha)
