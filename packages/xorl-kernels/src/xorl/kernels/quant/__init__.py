"""Low-precision number formats: matrices cast with their scales, and products of them."""

from xorl.kernels.quant.block_fp8 import dequantize_block_fp8, quantize_block_fp8
from xorl.kernels.quant.device import QuantFormat, quant_refusal
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
from xorl.kernels.quant.nf4 import dequantize_nf4, quantize_nf4
from xorl.kernels.quant.noise import WeightNoise, normal_pairs
from xorl.kernels.quant.nvfp4 import dequantize_nvfp4, nvfp4_global_scale, quantize_nvfp4
from xorl.kernels.quant.products import adapted_quantized_linear, dequantized, quantized_linear
from xorl.kernels.quant.weights import GROUP_SIZES, QuantizedWeight, QuantScheme

__all__ = [
    "E4M3",
    "E5M2",
    "GROUP_SIZES",
    "QuantFormat",
    "QuantScheme",
    "QuantizedWeight",
    "WeightNoise",
    "adapted_quantized_linear",
    "amax",
    "cast_axiswise",
    "cast_columnwise",
    "cast_into_",
    "cast_rowwise",
    "cast_tensorwise",
    "cast_tensorwise_both",
    "dequantize_block_fp8",
    "dequantize_nf4",
    "dequantize_nvfp4",
    "dequantized",
    "fp8_refusal",
    "normal_pairs",
    "nvfp4_global_scale",
    "quant_refusal",
    "quantize_block_fp8",
    "quantize_nf4",
    "quantize_nvfp4",
    "quantized_linear",
    "scaled_mm",
    "transpose",
]
