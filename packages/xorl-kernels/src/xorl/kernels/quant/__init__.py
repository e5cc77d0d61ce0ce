"""Frozen weights in four or eight bits, and products with them. Casts and products in fp8 are in `quant.fp8`."""

from xorl.kernels.quant.device import QuantFormat, quant_refusal
from xorl.kernels.quant.noise import WeightNoise
from xorl.kernels.quant.products import adapted_quantized_linear, dequantized, quantized_linear
from xorl.kernels.quant.weights import GROUP_SIZES, QuantizedWeight, QuantScheme

__all__ = [
    "GROUP_SIZES",
    "QuantFormat",
    "QuantScheme",
    "QuantizedWeight",
    "WeightNoise",
    "adapted_quantized_linear",
    "dequantized",
    "quant_refusal",
    "quantized_linear",
]
