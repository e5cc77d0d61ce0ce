"""The modules that decoders are made of. They know mathematics: no placement, no device, no weight names on disk."""

from xorl.core.nn.attention import Attention
from xorl.core.nn.kernels import FusedKernel, LayerKernels, choose_kernels
from xorl.core.nn.layers import ACTIVATIONS, Embedding, GatedMLP, HeadNorm, LayerNorm, Linear, PlainMLP, RMSNorm
from xorl.core.nn.rotary import ROPE_KINDS, RopeConfig, RopeKind, Rotary

__all__ = [
    "ACTIVATIONS",
    "ROPE_KINDS",
    "Attention",
    "Embedding",
    "FusedKernel",
    "GatedMLP",
    "HeadNorm",
    "LayerKernels",
    "LayerNorm",
    "Linear",
    "PlainMLP",
    "RMSNorm",
    "RopeConfig",
    "RopeKind",
    "Rotary",
    "choose_kernels",
]
