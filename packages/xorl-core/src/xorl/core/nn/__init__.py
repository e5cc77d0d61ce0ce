"""Building blocks of decoders. They are independent of sharding, devices and the names of weights on disk."""

from xorl.core.nn.attention import Attention
from xorl.core.nn.kernels import LayerKernels
from xorl.core.nn.layers import Embedding, GatedMLP, HeadNorm, LayerNorm, Linear, PlainMLP, RMSNorm
from xorl.core.nn.rotary import RopeConfig, Rotary

__all__ = [
    "Attention",
    "Embedding",
    "GatedMLP",
    "HeadNorm",
    "LayerKernels",
    "LayerNorm",
    "Linear",
    "PlainMLP",
    "RMSNorm",
    "RopeConfig",
    "Rotary",
]
