"""Attention over packed rows: the interface, and the backends by name."""

from xorl.kernels.attention.backends import ATTENTION, resolve_attention
from xorl.kernels.attention.cached import (
    CachedLayout,
    DecodeLayout,
    KeyValueCache,
    MixedLayout,
    cached_attention,
    growth_refusal,
)
from xorl.kernels.attention.interface import AttentionFn, AttentionRequest
from xorl.kernels.attention.reference import eager_attention
from xorl.kernels.attention.sdpa import sdpa_attention

__all__ = [
    "ATTENTION",
    "AttentionFn",
    "AttentionRequest",
    "CachedLayout",
    "DecodeLayout",
    "KeyValueCache",
    "MixedLayout",
    "cached_attention",
    "eager_attention",
    "growth_refusal",
    "resolve_attention",
    "sdpa_attention",
]
