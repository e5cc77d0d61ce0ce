"""FLOPs of training, computed from the configuration and the documents' lengths."""

from collections import Counter
from collections.abc import Iterable

from xorl.core.models.decoder_config import DecoderConfig, DenseConfig, LayerConfig

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
    per_pair = FLOPS_PER_MULTIPLY_ADD * PASSES * 2 * config.attention.q_rows
    windows = Counter(config.windows).items()
    return sum(
        per_token * length + per_pair * sum(count * causal_pairs(length, window) for window, count in windows)
        for length in lengths
    )


def matmul_parameters(config: DecoderConfig) -> int:
    """The number of parameters that a token is multiplied with: the matrices of all layers and the head.

    Of the experts of a layer, only the active ones count.
    """
    per_width = sum(_layer_columns(layer) for layer in config.layers) + config.vocab_size
    return config.hidden_size * per_width


def _layer_columns(layer: LayerConfig) -> int:
    """Parameters of a layer's matrices for each unit of the model's width."""
    attention = 2 * layer.attention.q_rows + 2 * layer.attention.kv_rows
    ffn = layer.ffn
    if isinstance(ffn, DenseConfig):
        return attention + (3 if ffn.kind == "gated" else 2) * ffn.width
    return attention + ffn.num_experts + 3 * ffn.num_active * ffn.width


def causal_pairs(length: int, window: int | None) -> int:
    """(query, key) pairs in a document: token i attends to min(i + 1, window) tokens."""
    window = length if window is None else min(window, length)
    return window * (window + 1) // 2 + (length - window) * window
