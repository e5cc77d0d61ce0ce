"""Batched generation with the model that is being trained: requests in, tokens and log-probabilities out."""

from xorl.server.sampler.cache_size import cache_bytes_per_token, default_cache_tokens
from xorl.server.sampler.edits import EditRules, Matcher
from xorl.server.sampler.request import (
    DIVERGED,
    GeneratedSample,
    GenerationRequest,
    GenerationResult,
    LikelyTokens,
)
from xorl.server.sampler.sampler import Sampler

__all__ = [
    "DIVERGED",
    "EditRules",
    "GeneratedSample",
    "GenerationRequest",
    "GenerationResult",
    "LikelyTokens",
    "Matcher",
    "Sampler",
    "cache_bytes_per_token",
    "default_cache_tokens",
]
