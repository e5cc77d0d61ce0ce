"""The size of the sampler's cache of keys and values."""

from __future__ import annotations

import os

import torch

from xorl.core.models import Decoder, DecoderConfig

# The default size: this share of the device's memory, but at most this many full contexts.
CACHE_SHARE = 0.1
CACHE_CONTEXTS = 64


def cache_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """The bytes of the keys and values of one token, over all layers."""
    return 2 * sum(each.kv_rows for each in config.attentions) * dtype.itemsize


def default_cache_tokens(decoder: Decoder, device: torch.device, num_contexts: int = CACHE_CONTEXTS) -> int:
    """The tokens of a cache of at most CACHE_SHARE of the device's memory and `num_contexts` full contexts."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    # A model may have no keys and values at all.
    tokens = int(CACHE_SHARE * total / max(cache_bytes_per_token(decoder.config, decoder.compute_dtype), 1))
    return min(tokens, num_contexts * decoder.config.max_position_embeddings)
