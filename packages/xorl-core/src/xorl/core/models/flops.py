"""FLOPs of training, computed from the configuration and the documents' lengths."""

from collections import Counter
from collections.abc import Iterable

from xorl.core.models.decoder_config import DecoderConfig

# A multiply and an add. The backward pass has two matrix products for each one of the forward pass.
FLOPS_PER_MULTIPLY_ADD = 2
PASSES = 3


def training_flops(config: DecoderConfig, lengths: Iterable[int], *, num_frozen: int = 0, num_added: int = 0) -> int:
    """FLOPs of one forward and backward pass over documents of these lengths.

    Counts only matrix products, each once forward and twice backward:

    - Each of the N parameters in matrices costs one multiply-add per token, so 6 * N * T FLOPs for T tokens. N
      includes the head, tied or not, but not the embedding, which is a lookup.
    - Attention makes two products per layer, q @ k.T and weights @ v, each H * C multiply-adds per (query, key)
      pair: 3 * 2 * 2 * H * C * pairs, where a document of L tokens has L * (L + 1) / 2 causal pairs, fewer with a
      sliding window (see `causal_pairs`).
    - `num_frozen` of the N parameters have no gradient and cost 4 operations per token instead of 6.
    - `num_added` is the number of additional trained parameters in matrices, such as those of adapters.

    Recomputation is not counted, because it is not progress.
    """
    per_token = FLOPS_PER_MULTIPLY_ADD * (PASSES * (matmul_parameters(config) + num_added) - num_frozen)
    per_pair = FLOPS_PER_MULTIPLY_ADD * PASSES * 2 * config.num_heads * config.head_dim
    windows = Counter(config.windows).items()
    return sum(
        per_token * length + per_pair * sum(count * causal_pairs(length, window) for window, count in windows)
        for length in lengths
    )


def matmul_parameters(config: DecoderConfig) -> int:
    """The number of parameters that every token is multiplied with: the matrices of all layers and the head."""
    attention = config.hidden_size * (2 * config.q_rows + 2 * config.kv_rows)
    num_mlp_matrices = 3 if config.mlp == "gated" else 2
    mlp = num_mlp_matrices * config.hidden_size * config.intermediate_size
    return config.num_layers * (attention + mlp) + config.vocab_size * config.hidden_size


def causal_pairs(length: int, window: int | None) -> int:
    """(query, key) pairs in a document: token i attends to min(i + 1, window) tokens."""
    window = length if window is None else min(window, length)
    return window * (window + 1) // 2 + (length - window) * window
