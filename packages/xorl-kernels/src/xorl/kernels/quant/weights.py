"""Storage of quantised weights: a common interface for all formats, their layouts, and the supported shapes.

A weight [O, I] is stored as tensors whose first dimension indexes units. A unit is one row or, in block_fp8, the rows
that a block covers. Units are independent of each other, so ranks can shard them, quantise their own and gather the
results. All fields except fp32 scales are bytes, which every communication library and file format supports.

Shapes: O output features, I input features, G group size, U units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from xorl.kernels.arguments import check_at_least, check_choice, check_floating, check_one_device
from xorl.kernels.quant.block_fp8 import dequantize_block_fp8, quantize_block_fp8
from xorl.kernels.quant.device import QuantFormat
from xorl.kernels.quant.nf4 import dequantize_nf4, quantize_nf4
from xorl.kernels.quant.noise import WeightNoise
from xorl.kernels.quant.nvfp4 import dequantize_nvfp4, quantize_nvfp4

GROUP_SIZES: Mapping[QuantFormat, int] = MappingProxyType({"nf4": 64, "nvfp4": 16, "block_fp8": 128})
# The smallest and the largest group. Kernels load whole groups into registers, and block lengths there are powers of
# two; NVFP4 is defined with groups of 16.
_GROUP_LIMITS: Mapping[QuantFormat, tuple[int, int]] = MappingProxyType(
    {"nf4": (16, 1024), "nvfp4": (16, 16), "block_fp8": (16, 256)}
)


class QuantizedWeight(NamedTuple):
    """Codes, the scale of each group and, for nvfp4, the global scale of each row; see `QuantScheme.stored`."""

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None


@dataclass(frozen=True)
class QuantScheme:
    """A format, and the number of weights of a row that share a scale; for block_fp8, the side of a square block.

    Raises ValueError for an unknown format and a group size that the format does not have.
    """

    quant_format: QuantFormat
    group_size: int

    def __post_init__(self) -> None:
        check_choice("quant_format", self.quant_format, QuantFormat)
        smallest, largest = _GROUP_LIMITS[self.quant_format]
        size = self.group_size
        check_at_least("group_size", size, 1)
        if not smallest <= size <= largest or size.bit_count() != 1:
            sizes = f"a power of two from {smallest} to {largest}, usually" if smallest < largest else "only"
            raise ValueError(
                f"group_size: {size} is not a valid group size for {self.quant_format}; use {sizes} "
                f"{GROUP_SIZES[self.quant_format]}"
            )

    @property
    def unit_rows(self) -> int:
        """Rows that are quantised together."""
        return self.group_size if self.quant_format == "block_fp8" else 1

    def shape_refusal(self, in_features: int) -> str | None:
        """The reason why rows of this length cannot be quantised, or None. block_fp8 allows incomplete blocks."""
        if self.quant_format == "block_fp8" or in_features % self.group_size == 0:
            return None
        reason = f"rows of {in_features} weights cannot be divided into groups of {self.group_size}"
        # The largest power of two that divides the rows.
        smallest, largest = _GROUP_LIMITS[self.quant_format]
        fitting = min(in_features & -in_features, largest)
        return f"{reason}, but into groups of {fitting}" if fitting >= smallest else reason

    def stored(self, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the fields of a QuantizedWeight that are not None.

        nf4: codes [O, I / 2], scales fp32 [O, I / G].
        nvfp4: codes [O, I / 2], scales [O, I / G] (E4M3 as bytes), global_scale fp32 [O].
        block_fp8: codes [U, G, I] (E4M3 as bytes; rows beyond O are padding), scales fp32 [U, ceil(I / G)].
        """
        groups = math.ceil(in_features / self.group_size)
        if self.quant_format == "block_fp8":
            units = math.ceil(out_features / self.group_size)
            return {
                "codes": ((units, self.group_size, in_features), torch.uint8),
                "scales": ((units, groups), torch.float32),
            }
        codes = ((out_features, in_features // 2), torch.uint8)
        if self.quant_format == "nf4":
            return {"codes": codes, "scales": ((out_features, groups), torch.float32)}
        return {
            "codes": codes,
            "scales": ((out_features, groups), torch.uint8),
            "global_scale": ((out_features,), torch.float32),
        }

    def check_stored(self, weight: QuantizedWeight, num_rows: int) -> None:
        """Raise ValueError unless the fields of `weight` are those of a weight [num_rows, I]."""
        fields = {"codes": weight.codes, "scales": weight.scales, "global_scale": weight.global_scale}
        given = {name: (tuple(field.shape), field.dtype) for name, field in fields.items() if field is not None}
        wanted = self.stored(num_rows, num_columns(weight.codes, self.quant_format))
        if given != wanted:
            raise ValueError(
                f"codes, scales and global_scale must be those of {num_rows} rows in {self.quant_format}, {wanted}; "
                f"got {given}"
            )
        check_one_device(**fields)

    def quantize(self, weight: Tensor, global_scale: Tensor | None = None) -> QuantizedWeight:
        """Quantise weight [rows, I] of any floating-point dtype; nvfp4 also needs `global_scale`, fp32 [rows].

        Raises ValueError for a weight of another shape or dtype, and for a global scale that the format does not have.
        """
        if weight.dim() != 2 or not weight.is_floating_point():
            raise ValueError(
                f"weight: must be a matrix of floating-point numbers, got {weight.dtype} {list(weight.shape)}"
            )
        if refusal := self.shape_refusal(weight.shape[1]):
            raise ValueError(f"weight: {refusal}")
        self._check_global_scale(global_scale, len(weight))
        if self.quant_format == "nf4":
            return QuantizedWeight(*quantize_nf4(weight, self.group_size), None)
        if global_scale is not None:
            codes, scales = quantize_nvfp4(weight, global_scale, self.group_size)
            return QuantizedWeight(codes, scales.view(torch.uint8), global_scale)
        codes, scales = quantize_block_fp8(weight, self.group_size)
        padded = codes.new_zeros((len(scales) * self.group_size, codes.shape[1]), dtype=torch.uint8)
        padded[: len(codes)] = codes.view(torch.uint8)
        return QuantizedWeight(padded.unflatten(0, (-1, self.group_size)), scales, None)

    def dequantize(
        self, weight: QuantizedWeight, num_rows: int, dtype: torch.dtype, noise: WeightNoise | None = None
    ) -> Tensor:
        """The weight [num_rows, I] in `dtype`, without padding rows.

        Raises ValueError for fields that are not those of a weight with `num_rows` rows, and for a `dtype` that is not
        floating-point.
        """
        check_floating("dtype", dtype)
        self.check_stored(weight, num_rows)
        return dequantize_stored(self, weight, num_rows, dtype, noise)

    def _check_global_scale(self, global_scale: Tensor | None, num_rows: int) -> None:
        if self.quant_format != "nvfp4":
            if global_scale is not None:
                raise ValueError(f"global_scale: {self.quant_format} has none; leave it out")
        elif global_scale is None or (global_scale.shape, global_scale.dtype) != ((num_rows,), torch.float32):
            given = None if global_scale is None else f"{global_scale.dtype} {list(global_scale.shape)}"
            raise ValueError(f"global_scale: nvfp4 needs one, fp32 [{num_rows}]; got {given}")


def num_columns(codes: Tensor, quant_format: str) -> int:
    """I of the weight with these codes."""
    return codes.shape[-1] if quant_format == "block_fp8" else 2 * codes.shape[-1]


def dequantize_stored(
    scheme: QuantScheme, weight: QuantizedWeight, num_rows: int, dtype: torch.dtype, noise: WeightNoise | None
) -> Tensor:
    """`QuantScheme.dequantize` of fields that have been checked."""
    codes, scales, global_scale = weight
    if scheme.quant_format == "nf4":
        return dequantize_nf4(codes, scales, dtype, noise)
    if global_scale is not None:
        return dequantize_nvfp4(codes, scales.view(torch.float8_e4m3fn), global_scale, dtype, noise)
    rows = codes.flatten(0, 1)[:num_rows].view(torch.float8_e4m3fn)
    return dequantize_block_fp8(rows, scales, scheme.group_size, dtype, noise)
