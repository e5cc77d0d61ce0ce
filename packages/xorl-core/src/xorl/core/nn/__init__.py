"""The modules that decoders are made of. They know mathematics: no placement, no device, no weight names on disk."""

from xorl.core.nn.attention import Attention
from xorl.core.nn.layers import ACTIVATIONS, Embedding, GatedMLP, LayerNorm, Linear, PlainMLP, RMSNorm
from xorl.core.nn.rotary import ROPE_KINDS, RopeConfig, RopeKind, RopeTables, Rotary, apply_rope

__all__ = [
    "ACTIVATIONS",
    "ROPE_KINDS",
    "Attention",
    "Embedding",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "PlainMLP",
    "RMSNorm",
    "RopeConfig",
    "RopeKind",
    "RopeTables",
    "Rotary",
    "apply_rope",
]
