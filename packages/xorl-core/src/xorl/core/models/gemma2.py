"""Gemma 2: caps on attention scores and logits, norms that multiply by 1 + w around each block, and every second layer
with a window."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.nn import NormConfig

ARCHITECTURE = "Gemma2ForCausalLM"
DEFAULTS: Mapping[str, object] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. Scores are divided by the square root of `query_pre_attn_scalar`."""
    hf = HFConfig(values, ARCHITECTURE, **DEFAULTS)
    hf.refuse("use_bidirectional_attention", "attention is causal")
    bias = hf.get("attention_bias", bool, False)
    ffn = rotary_gated.read_dense(hf, activation_key="hidden_activation", activation="gelu_pytorch_tanh")
    num_layers = hf.positive("num_hidden_layers")
    sliding = rotary_gated.SLIDING if hf.has("sliding_window") else rotary_gated.FULL
    pattern = [rotary_gated.FULL if index % 2 else sliding for index in range(num_layers)]
    config = rotary_gated.read_config(
        hf,
        norms="sandwich",
        qkv_bias=bias,
        o_bias=bias,
        norm=NormConfig("rms", hf.get("rms_norm_eps", float, 1e-6), offset=1.0),
        windows=rotary_gated.windows_of(hf, pattern),
        ffns=[ffn] * num_layers,
    )
    scale = hf.above_zero("query_pre_attn_scalar") ** -0.5
    score_cap, logit_cap = hf.cap("attn_logit_softcapping"), hf.cap("final_logit_softcapping")
    hf.finish()
    config = config.with_layers(
        lambda _, layer: replace(layer, mixer=replace(layer.attention, scale=scale, softcap=score_cap))
    )
    return replace(config, embed_scale=config.hidden_size**0.5, logit_softcap=logit_cap)


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="gemma2",
    config_from_hf=config_from_hf,
    checkpoint_names=replace(rotary_gated.CHECKPOINT_NAMES, modules=rotary_gated.AROUND_BLOCKS),
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
)
