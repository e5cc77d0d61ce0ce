"""The sampler's cache of keys, values and states, and its size."""

from __future__ import annotations

import math
import os

import torch

from xorl.core.models import Decoder, DecoderConfig
from xorl.core.nn import AttentionConfig
from xorl.kernels.attention import KeyValueCache

# The default size: this share of the device's memory, but at most this many full contexts.
CACHE_SHARE = 0.1
CACHE_CONTEXTS = 64


def cache_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """The bytes of the keys and values of one token, over all layers."""
    return 2 * sum(each.kv_rows for each in config.attentions) * dtype.itemsize


def state_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """The bytes of the states of one sequence, over all layers that compute in `dtype`."""
    num_elements = sum(math.prod(shape) for each in config.recurrences for shape in each.state_shapes)
    return num_elements * torch.promote_types(dtype, torch.float32).itemsize


def num_slots(decoder: Decoder, device: torch.device, max_running: int) -> int:
    """How many sequences may have states: `max_running`, or as many as fit in CACHE_SHARE of the device's memory."""
    bytes_per_slot = state_bytes(decoder.config, decoder.compute_dtype)
    if not bytes_per_slot:
        return max_running
    return max(min(max_running, int(CACHE_SHARE * _memory(device)) // bytes_per_slot), 1)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def default_cache_tokens(decoder: Decoder, device: torch.device, num_contexts: int = CACHE_CONTEXTS) -> int:
    """The tokens of a cache of at most CACHE_SHARE of the device's memory and `num_contexts` full contexts."""
    # A model may have no keys and values at all.
    tokens = int(CACHE_SHARE * _memory(device) / max(cache_bytes_per_token(decoder.config, decoder.compute_dtype), 1))
    return min(tokens, num_contexts * decoder.config.max_position_embeddings)


def make_cache(
    decoder: Decoder, device: torch.device, block_size: int, num_blocks: int, num_slots: int
) -> KeyValueCache:
    """The keys and values of layers with attention, in blocks, and the states of those with recurrences, in slots."""
    mixers = [layer.mixer for layer in decoder.config.layers]
    return KeyValueCache(
        layers=[(each.num_kv_heads, each.head_dim) if isinstance(each, AttentionConfig) else None for each in mixers],
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=decoder.compute_dtype,
        device=device,
        states={
            index: each.state_shapes
            for index, each in enumerate(mixers)
            if each is not None and not isinstance(each, AttentionConfig)
        },
        num_slots=num_slots,
    )
