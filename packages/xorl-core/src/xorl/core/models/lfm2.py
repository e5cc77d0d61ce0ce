"""LFM2: gated short convolutions, and attention with normalised heads in some layers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, DenseConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.nn import NormConfig
from xorl.core.nn.short_conv import ShortConvConfig

ARCHITECTURE = "Lfm2ForCausalLM"
DEFAULTS: Mapping[str, object] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rope_theta": 1e6,
    "pad_token_id": 0,
    "block_ffn_dim_multiplier": 1.0,
}
CONV = "conv"
MODULES: Mapping[str, str] = {
    "model.norm": "model.embedding_norm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "self_attn.o_proj": "self_attn.out_proj",
    "linear_attn.in_proj": "conv.in_proj",
    "linear_attn.conv": "conv.conv",
    "linear_attn.out_proj": "conv.out_proj",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
# What only the original code reads: other names of the model's width and of its heads, and initial values.
INERT = (
    *("block_dim", "conv_dim", "conv_dim_out", "num_heads", "block_norm_eps"),
    *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"),
)
FIXED: Mapping[str, object] = {"block_use_swiglu": True, "use_pos_enc": True}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `tie_embedding` and `block_ff_dim` are older names, which come first."""
    hf = HFConfig(values, ARCHITECTURE, **DEFAULTS)
    tied = hf.get("tie_embedding", bool, hf.get("tie_word_embeddings", bool, True))
    num_layers = hf.positive("num_hidden_layers")
    config = rotary_gated.read_config(
        hf,
        qk_norm="head",
        norm=NormConfig("rms", hf.get("norm_eps", float, 1e-5)),
        ffns=[DenseConfig("gated", _read_width(hf), "silu", bias=False)] * num_layers,
    )
    conv = ShortConvConfig(config.hidden_size, hf.positive("conv_L_cache", 3), hf.get("conv_bias", bool, False))
    types = _read_types(hf, num_layers)
    hf.finish(inert=INERT, fixed=FIXED)
    config = config.with_layers(lambda index, layer: replace(layer, mixer=conv) if types[index] == CONV else layer)
    return replace(config, tie_word_embeddings=tied)


def _read_width(hf: HFConfig) -> int:
    """The width of feed-forward blocks: two thirds of the one given, times a factor, and rounded up to a multiple."""
    width = hf.positive("block_ff_dim", hf.positive("intermediate_size", 12288))
    if not hf.get("block_auto_adjust_ff_dim", bool, True):
        for key in ("block_ffn_dim_multiplier", "block_multiple_of"):
            hf.has(key)
        return width
    multiple = hf.positive("block_multiple_of", 256)
    width = int(2 * width / 3)
    if not hf.has("block_ffn_dim_multiplier"):
        return width
    width = int(hf.above_zero("block_ffn_dim_multiplier") * width)
    return -(-width // multiple) * multiple


def _read_types(hf: HFConfig, num_layers: int) -> Sequence[str]:
    """The kind of each layer from `layer_types`; else, attention in `full_attn_idxs`, or everywhere."""
    attending = hf.items("full_attn_idxs", int) if hf.has("full_attn_idxs") else list(range(num_layers))
    pattern = [rotary_gated.FULL if index in attending else CONV for index in range(num_layers)]
    return rotary_gated.read_layer_types(hf, pattern, [CONV, rotary_gated.FULL])


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="lfm2",
    config_from_hf=config_from_hf,
    checkpoint_names=replace(rotary_gated.CHECKPOINT_NAMES, modules=MODULES),
    adapter_targets=("q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"),
)
