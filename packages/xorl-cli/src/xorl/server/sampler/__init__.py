"""Batched generation with the model that is being trained: requests in, tokens and log-probabilities out."""

from xorl.server.sampler.request import GeneratedSample, GenerationRequest, GenerationResult, LikelyTokens
from xorl.server.sampler.sampler import Sampler, cache_bytes_per_token

__all__ = [
    "GeneratedSample",
    "GenerationRequest",
    "GenerationResult",
    "LikelyTokens",
    "Sampler",
    "cache_bytes_per_token",
]
