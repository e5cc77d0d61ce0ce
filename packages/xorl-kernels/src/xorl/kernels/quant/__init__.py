"""Numbers of few bits: matrices cast with their scales, and products of them."""

from xorl.kernels.quant.fp8 import (
    E4M3,
    E5M2,
    amax,
    cast_axiswise,
    cast_columnwise,
    cast_into_,
    cast_rowwise,
    cast_tensorwise,
    cast_tensorwise_both,
    fp8_refusal,
    scaled_mm,
    transpose,
)

__all__ = [
    "E4M3",
    "E5M2",
    "amax",
    "cast_axiswise",
    "cast_columnwise",
    "cast_into_",
    "cast_rowwise",
    "cast_tensorwise",
    "cast_tensorwise_both",
    "fp8_refusal",
    "scaled_mm",
    "transpose",
]
