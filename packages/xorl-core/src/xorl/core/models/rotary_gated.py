"""Config keys and recipes shared by families with rotary positions, RMS norms and a gated feed-forward block."""

from collections.abc import Mapping

from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.recipes import CheckpointNames, Rows, WeightRecipe, matrix, vector
from xorl.core.models.rope_config import ROPE_TYPES, read_rope, rope_keys
from xorl.core.nn.rotary import RopeKind

ADAPTER_TARGETS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
FULL, SLIDING = "full_attention", "sliding_attention"
# Defaults of the families with sliding windows, for keys missing in their config.json.
DEFAULT_WINDOW = 4096
DEFAULT_NUM_KV_HEADS = 32
DEFAULT_MAX_WINDOW_LAYERS = 28
CHECKPOINT_NAMES = CheckpointNames(
    prefix="model.", embedding="model.embed_tokens.weight", head="lm_head.weight", ignored=r"\brotary_emb\."
)


def read_config(
    hf: HFConfig,
    *,
    rope_types: Mapping[str, RopeKind] = ROPE_TYPES,
    qk_norm: bool,
    qkv_bias: bool,
    o_bias: bool,
    mlp_bias: bool,
    windows: tuple[int | None, ...] | None = None,
    default_head_dim: int | None = None,
    default_num_kv_heads: int | None = None,
) -> DecoderConfig:
    """Translate the keys shared by these families; the arguments are the differences.

    default_num_kv_heads: used if num_key_value_heads is missing. If the key is null or there is no default, it is the
        number of attention heads.
    """
    num_layers = hf.positive("num_hidden_layers")
    num_heads = hf.positive("num_attention_heads")
    hidden_size = hf.positive("hidden_size")
    head_dim = hf.positive("head_dim", default_head_dim or hidden_size // num_heads)
    uses_default = default_num_kv_heads is not None and not hf.contains("num_key_value_heads")
    max_position_embeddings = hf.positive("max_position_embeddings")
    hf.warn_about_dropout()
    return DecoderConfig(
        vocab_size=hf.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=hf.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=hf.positive("num_key_value_heads", default_num_kv_heads if uses_default else num_heads),
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        windows=windows or (None,) * num_layers,
        attention_scales=(head_dim**-0.5,) * num_layers,
        rope=read_rope(hf, max_position_embeddings, rope_types),
        norm="rms",
        norm_eps=hf.get("rms_norm_eps", float, 1e-6),
        mlp="gated",
        activation=hf.activation("hidden_act", "silu"),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        tie_word_embeddings=hf.get("tie_word_embeddings", bool, False),
        initializer_range=hf.get("initializer_range", float, 0.02),
        scale_residual_init=False,
    )


def read_windows(hf: HFConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer, from `layer_types`, or for all layers from `max_window_layers` on.

    A null `sliding_window` disables windows; a missing one is DEFAULT_WINDOW.
    """
    num_layers = hf.positive("num_hidden_layers")
    is_null = hf.contains("sliding_window") and not hf.has("sliding_window")
    enabled = hf.get("use_sliding_window", bool, False) and not is_null
    window = hf.positive("sliding_window", DEFAULT_WINDOW)
    first = hf.get("max_window_layers", int, DEFAULT_MAX_WINDOW_LAYERS)
    if hf.has("layer_types"):
        layer_types = hf.strings("layer_types")
    else:
        layer_types = [SLIDING if enabled and index >= first else FULL for index in range(num_layers)]
    for layer_type in layer_types:
        hf.expect("layer_types", layer_type, [FULL, SLIDING] if enabled else [FULL])
    hf.expect("number of layer_types", len(layer_types), [num_layers])
    return tuple(window if layer_type == SLIDING else None for layer_type in layer_types)


def window_keys(config: DecoderConfig) -> dict[str, object]:
    """The config.json keys that describe the windows: the inverse of `read_windows`."""
    window = next((window for window in config.windows if window is not None), None)
    layer_types = [FULL if window is None else SLIDING for window in config.windows]
    return {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": layer_types}


def hf_keys(config: DecoderConfig, rope_types: Mapping[str, RopeKind] = ROPE_TYPES) -> dict[str, object]:
    """The config.json keys these families share: the inverse of `read_config`."""
    assert config.rope is not None
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope_keys(config.rope, rope_types),
        "rms_norm_eps": config.norm_eps,
        "hidden_act": config.activation,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
    }


def recipes(config: DecoderConfig, merge_qkv: bool) -> dict[str, WeightRecipe]:
    """Recipes under native names, in the order of the decoder's parameters."""
    width = config.hidden_size
    table: dict[str, WeightRecipe] = {
        "model.embed_tokens.weight": matrix("model.embed_tokens.weight", (config.vocab_size, width))
    }
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        table[f"{layer}.input_layernorm.weight"] = vector(f"{layer}.input_layernorm.weight", width)
        table |= _attention_recipes(config, f"{layer}.self_attn", merge_qkv)
        table[f"{layer}.post_attention_layernorm.weight"] = vector(f"{layer}.post_attention_layernorm.weight", width)
        table |= _mlp_recipes(config, f"{layer}.mlp")
    table["model.norm.weight"] = vector("model.norm.weight", width)
    if not config.tie_word_embeddings:
        table["lm_head.weight"] = matrix("lm_head.weight", (config.vocab_size, width))
    return table


def _attention_recipes(config: DecoderConfig, prefix: str, merge_qkv: bool) -> dict[str, WeightRecipe]:
    rows = {"q_proj": config.q_rows, "k_proj": config.kv_rows, "v_proj": config.kv_rows}
    groups = {"qkv_proj": tuple(rows)} if merge_qkv else {name: (name,) for name in rows}
    table: dict[str, WeightRecipe] = {}
    for native, names in groups.items():
        table |= _stacked(prefix, native, {name: rows[name] for name in names}, config.hidden_size, config.qkv_bias)
    if config.qk_norm:
        for norm in ("q_norm", "k_norm"):
            table[f"{prefix}.{norm}.weight"] = vector(f"{prefix}.{norm}.weight", config.head_dim)
    return table | _stacked(prefix, "o_proj", {"o_proj": config.hidden_size}, config.q_rows, config.o_bias)


def _mlp_recipes(config: DecoderConfig, prefix: str) -> dict[str, WeightRecipe]:
    up = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
    down = {"down_proj": config.hidden_size}
    return _stacked(prefix, "gate_up_proj", up, config.hidden_size, config.mlp_bias) | _stacked(
        prefix, "down_proj", down, config.intermediate_size, config.mlp_bias
    )


def _stacked(prefix: str, native: str, rows: dict[str, int], width: int, bias: bool) -> dict[str, WeightRecipe]:
    """The weight, and bias if any, of a linear layer that stacks the linear layers named in `rows`."""
    counts = tuple(rows.values())
    table: dict[str, WeightRecipe] = {
        f"{prefix}.{native}.weight": Rows(tuple(f"{prefix}.{name}.weight" for name in rows), counts, (width,))
    }
    if bias:
        table[f"{prefix}.{native}.bias"] = Rows(tuple(f"{prefix}.{name}.bias" for name in rows), counts, ())
    return table
