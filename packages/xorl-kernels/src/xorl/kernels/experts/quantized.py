"""Quantised weights of experts, which the operators of a layer dequantise where they use them.

Shapes: E experts, O output and I input features of a projection.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from xorl.kernels.quant import QuantFormat, QuantizedWeight, QuantScheme, dequantized
from xorl.kernels.quant.weights import num_columns


class QuantizedExperts(NamedTuple):
    """The frozen weights of one projection of all experts, as rows of one matrix.

    weight: of [E * O, I], as `scheme` stores it.
    num_experts, num_rows: E and E * O.
    noise: None, or the `state` of a WeightNoise.
    noise_alpha: the `alpha` of that noise.
    """

    weight: QuantizedWeight
    scheme: QuantScheme
    num_experts: int
    num_rows: int
    noise: Tensor | None = None
    noise_alpha: float = 0.0

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weights [E, O, I] in `dtype`."""
        scheme = self.scheme.quant_format, self.scheme.group_size
        weight = dequantized(*self.weight, *scheme, self.num_rows, dtype, self.noise, self.noise_alpha)
        return weight.unflatten(0, (self.num_experts, -1))


# [E, O, I] in the dtype of the input, or quantised.
ExpertsWeight: TypeAlias = Tensor | QuantizedExperts


def num_experts_of(weight: ExpertsWeight) -> int:
    """E."""
    return weight.num_experts if isinstance(weight, QuantizedExperts) else len(weight)


def shape_of(weight: ExpertsWeight) -> list[int]:
    """[E, O, I]."""
    if not isinstance(weight, QuantizedExperts):
        return list(weight.shape)
    num_inputs = num_columns(weight.weight.codes, weight.scheme.quant_format)
    return [weight.num_experts, weight.num_rows // weight.num_experts, num_inputs]


def dense(weight: ExpertsWeight, dtype: torch.dtype) -> Tensor:
    """[E, O, I] in `dtype`."""
    return weight.dense(dtype) if isinstance(weight, QuantizedExperts) else weight


class StoredExperts(NamedTuple):
    """An ExpertsWeight in the form of an operator's arguments.

    tensors: the weight itself, or codes, scales, global scale and noise, empty if there is none.
    form: "", or the scheme's format and group size and the noise's alpha.
    """

    tensors: list[Tensor]
    form: str

    @classmethod
    def of(cls, weight: ExpertsWeight) -> StoredExperts:
        """The arguments for a weight."""
        if not isinstance(weight, QuantizedExperts):
            return cls([weight], "")
        found = [*weight.weight, weight.noise]
        tensors = [weight.weight.codes.new_empty(0) if tensor is None else tensor for tensor in found]
        return cls(tensors, f"{weight.scheme.quant_format} {weight.scheme.group_size} {weight.noise_alpha!r}")

    def dense(self, num_experts: int, num_rows: int, dtype: torch.dtype) -> Tensor:
        """The weights [E, O, I] in `dtype`, with num_rows = E * O."""
        if not self.form:
            return self.tensors[0]
        codes, scales, global_scale, noise = self.tensors
        quant_format, group_size, alpha = self.form.split()
        return QuantizedExperts(
            QuantizedWeight(codes, scales, global_scale if global_scale.numel() else None),
            QuantScheme(cast(QuantFormat, quant_format), int(group_size)),
            num_experts,
            num_rows,
            noise if noise.numel() else None,
            float(alpha),
        ).dense(dtype)
