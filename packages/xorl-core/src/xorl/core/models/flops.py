"""FLOPs of training, computed from the configuration and the documents' lengths."""

from collections import Counter
from collections.abc import Iterable

from xorl.core.models.decoder_config import DecoderConfig, DenseConfig, LayerConfig, Recurrence
from xorl.core.models.image_config import NUM_COLORS, ImageConfig
from xorl.core.nn.attention import AttentionConfig

FLOPS_PER_MULTIPLY_ADD = 2
# For each matrix product in the forward pass, the backward pass has two, one for the gradient of each operand.
PRODUCTS_PER_FORWARD_PRODUCT = 3


def training_flops(config: DecoderConfig, lengths: Iterable[int], *, num_frozen: int = 0, num_added: int = 0) -> int:
    """FLOPs of one forward and backward pass over documents of these lengths.

    Counts only matrix products, each once forward and twice backward:

    - Each of the N parameters in matrices costs one multiply-add per token, so 6 * N * T FLOPs for T tokens. N
      includes the head, tied or not, but not the embedding, which is a lookup.
    - Attention makes two products per layer, q @ k.T and weights @ v, each H * C multiply-adds per (query, key)
      pair, with the C of values in the second: 3 * 2 * 2 * H * C * pairs. A document of L tokens has L * (L + 1) / 2
      causal pairs, fewer with a sliding window (see `causal_pairs`).
    - Recurrences make products with their state for each token: see their `num_products`.
    - `num_frozen` of the N parameters have no gradient and cost 4 FLOPs per token instead of 6.
    - `num_added` is the number of additional trained parameters in matrices, such as those of adapters.

    Recomputation is not counted, because it is overhead. Raises ValueError for a negative length and for
    more frozen parameters than there are.
    """
    num_parameters = matmul_parameters(config) + num_added
    if not 0 <= num_frozen <= num_parameters:
        raise ValueError(f"num_frozen: {num_frozen} is not from 0 to {num_parameters}, the parameters in matrices")
    num_products = num_parameters + sum(each.num_products for each in config.recurrences)
    per_token = FLOPS_PER_MULTIPLY_ADD * (PRODUCTS_PER_FORWARD_PRODUCT * num_products - num_frozen)
    per_pair: Counter[int | None] = Counter()  # by window
    for attention in config.attentions:
        per_pair[attention.window] += FLOPS_PER_MULTIPLY_ADD * PRODUCTS_PER_FORWARD_PRODUCT * _pair_channels(attention)
    return sum(
        per_token * length + sum(flops * causal_pairs(length, window) for window, flops in per_pair.items())
        for length in lengths
    )


def image_flops(
    images: ImageConfig, grids: Iterable[tuple[int, int]], *, trains_tower: bool, trains_projectors: bool
) -> int:
    """FLOPs of encoding images of these grids of patches, by the rules of `training_flops`.

    A frozen tower only computes forward. The gradient of projectors includes that of their inputs, if those need it.
    """
    block = images.width * (4 * images.width + 2 * images.mlp_width)
    patch = NUM_COLORS * images.frames * images.patch_size**2 * images.width
    projector = images.merged_width * (images.merged_width + images.out_width)
    if images.projector_activation is not None:
        projector = images.out_width * (images.width + images.out_width)
    tower = projectors = 0
    for height, width in grids:
        num_patches = height * width
        length = num_patches + images.class_token
        pairs = 2 * images.width * length**2
        tower += num_patches * patch + images.num_blocks * (length * block + pairs)
        projectors += (1 + len(images.taps)) * projector * (num_patches // images.merge_size**2)
    of_tower = PRODUCTS_PER_FORWARD_PRODUCT if trains_tower else 1
    of_projectors = 1 + trains_projectors + trains_tower
    return FLOPS_PER_MULTIPLY_ADD * (of_tower * tower + of_projectors * projectors)


def matmul_parameters(config: DecoderConfig) -> int:
    """The number of parameters that multiply each token: those of the matrices in all layers and the head.

    Only the active experts of a layer count.
    """
    width = config.hidden_size
    return sum(_layer_parameters(layer, width) for layer in config.layers) + width * config.vocab_size


def forward_costs(config: DecoderConfig, length: int) -> tuple[list[float], float]:
    """Multiply-adds for each token of a document of `length` tokens: those of each layer, and those of the head."""
    layers = [_layer_parameters(layer, config.hidden_size) + _mixed(layer.mixer, length) for layer in config.layers]
    return layers, config.hidden_size * config.vocab_size


def _mixed(mixer: AttentionConfig | Recurrence | None, length: int) -> float:
    """Multiply-adds of a mixer for each token of a document of `length` tokens, without its parameters."""
    if mixer is None:
        return 0
    if isinstance(mixer, AttentionConfig):
        return _pair_channels(mixer) * causal_pairs(length, mixer.window) / length
    return mixer.num_products


def _pair_channels(attention: AttentionConfig) -> int:
    """Multiply-adds for a query and a key: those of their score, and of the weighted value."""
    return attention.num_heads * (attention.head_dim + attention.v_head_dim)


def _layer_parameters(layer: LayerConfig, width: int) -> int:
    """The number of parameters in a layer's matrices, of a model of this width."""
    mixer, ffn = 0 if layer.mixer is None else layer.mixer.num_parameters(width), layer.ffn
    if ffn is None:
        return mixer
    if isinstance(ffn, DenseConfig):
        return mixer + width * _dense_columns(ffn)
    shared = 0 if ffn.shared is None else _dense_columns(ffn.shared) + ffn.shared_gate
    inner, latent = (width, 0) if ffn.latent is None else (ffn.latent, 2 * ffn.latent)
    experts = (1 + ffn.gate.num_parts) * inner * ffn.num_active * ffn.width
    return mixer + experts + width * (ffn.num_experts + latent + shared)


def _dense_columns(ffn: DenseConfig) -> int:
    return (3 if ffn.kind == "gated" else 2) * ffn.width


def causal_pairs(length: int, window: int | None) -> int:
    """(query, key) pairs in a document: token i attends to min(i + 1, window) tokens."""
    if length < 0:
        raise ValueError(f"length: a document cannot have {length} tokens")
    window = length if window is None else min(window, length)
    return window * (window + 1) // 2 + (length - window) * window
