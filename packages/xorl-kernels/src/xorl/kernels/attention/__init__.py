"""Attention over packed rows: the contract, and the backends by name."""

from xorl.kernels.attention.backends import ATTENTION, resolve_attention
from xorl.kernels.attention.cached import CachedLayout, KeyValueCache, cached_attention
from xorl.kernels.attention.interface import AttentionFn, AttentionRequest
from xorl.kernels.attention.reference import eager_attention
from xorl.kernels.attention.sdpa import sdpa_attention

__all__ = [
    "ATTENTION",
    "AttentionFn",
    "AttentionRequest",
    "CachedLayout",
    "KeyValueCache",
    "cached_attention",
    "eager_attention",
    "resolve_attention",
    "sdpa_attention",
]
