"""Building blocks of decoders. They are independent of sharding, devices and the names of weights on disk."""

from xorl.core.nn.attention import Attention, AttentionConfig
from xorl.core.nn.kernels import LayerKernels
from xorl.core.nn.layers import Embedding, GatedMLP, Linear, PlainMLP
from xorl.core.nn.norms import HeadNorm, LayerNorm, NormConfig, RMSNorm
from xorl.core.nn.rotary import RopeConfig, Rotary

__all__ = [
    "Attention",
    "AttentionConfig",
    "Embedding",
    "GatedMLP",
    "HeadNorm",
    "LayerKernels",
    "LayerNorm",
    "Linear",
    "NormConfig",
    "PlainMLP",
    "RMSNorm",
    "RopeConfig",
    "Rotary",
]
