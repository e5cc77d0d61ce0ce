"""Attention over packed rows: the interface, and the backends by name."""

from xorl.kernels.attention.backends import ATTENTION, register_attention, resolve_attention
from xorl.kernels.attention.cached import (
    CachedLayout,
    DecodeLayout,
    KeyValueCache,
    MixedLayout,
    cached_attention,
    decode_refusal,
)
from xorl.kernels.attention.interface import AttentionFn, AttentionRequest
from xorl.kernels.attention.kernel import AttentionSpec
from xorl.kernels.attention.operator import PackedAttention

__all__ = [
    "ATTENTION",
    "AttentionFn",
    "AttentionRequest",
    "AttentionSpec",
    "CachedLayout",
    "DecodeLayout",
    "KeyValueCache",
    "MixedLayout",
    "PackedAttention",
    "cached_attention",
    "decode_refusal",
    "register_attention",
    "resolve_attention",
]
