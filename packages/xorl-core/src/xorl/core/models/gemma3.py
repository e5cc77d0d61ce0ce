"""Gemma 3 (text): norms that multiply by 1 + w around each block and in heads, and two rotations by type of layer."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.rope_config import read_rope_of_type
from xorl.core.models.spec import ModelSpec
from xorl.core.nn import NormConfig

ARCHITECTURE = "Gemma3ForCausalLM"
# The text_config of a composite model leaves out what it has of these.
DEFAULTS: Mapping[str, object] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. Scores are divided by the square root of `query_pre_attn_scalar`."""
    hf = HFConfig(values, ARCHITECTURE, **DEFAULTS)
    hf.refuse("use_bidirectional_attention", "attention is causal")
    hf.has("attn_logit_softcapping")  # this family does not cap scores, whatever it says
    bias = hf.get("attention_bias", bool, False)
    length = hf.positive("max_position_embeddings")
    full = read_rope_of_type(hf, rotary_gated.FULL, hf.get("rope_theta", float, 1e6), length, is_scaled=True)
    local_theta = hf.get("rope_local_base_freq", float, 1e4)
    sliding = read_rope_of_type(hf, rotary_gated.SLIDING, local_theta, length, is_scaled=False)
    ffn = rotary_gated.read_dense(hf, activation_key="hidden_activation", activation="gelu_pytorch_tanh")
    config = rotary_gated.read_config(
        hf,
        rope=full,
        norms="sandwich",
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        norm=NormConfig("rms", hf.get("rms_norm_eps", float, 1e-6), offset=1.0),
        windows=rotary_gated.read_patterned_windows(hf, "sliding_window_pattern", 6),
        ffns=[ffn] * hf.positive("num_hidden_layers"),
    )
    scale = hf.above_zero("query_pre_attn_scalar") ** -0.5
    softcap = hf.cap("final_logit_softcapping")
    hf.finish(inert=["_sliding_window_pattern"])
    config = config.with_ropes(full, sliding).with_layers(
        lambda _, layer: replace(layer, mixer=replace(layer.attention, scale=scale))
    )
    return replace(config, embed_scale=config.hidden_size**0.5, logit_softcap=softcap)


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="gemma3_text",
    config_from_hf=config_from_hf,
    checkpoint_names=replace(rotary_gated.CHECKPOINT_NAMES, modules=rotary_gated.AROUND_BLOCKS),
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
    composites=("Gemma3ForConditionalGeneration",),
)
