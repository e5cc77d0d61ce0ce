"""Generation with the trainer's own model: requests in, tokens and log-probabilities out, many at once."""

from xorl.server.sampler.request import Sample, SampleRequest, SampleResult, TopLogprobs
from xorl.server.sampler.sampler import Sampler, cache_bytes_per_token

__all__ = ["Sample", "SampleRequest", "SampleResult", "Sampler", "TopLogprobs", "cache_bytes_per_token"]
