"""Gemma 4 (text): norms around each block and in heads, of values too; layers without a window have wider heads, whose
values may be the keys, and rotate only in part; each layer has a factor on its output, and may have experts beside its
feed-forward block."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import mixtures, rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, DenseConfig, ExpertsConfig, LayerConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.rope_config import ROPE_TYPES, read_rope_of_type
from xorl.core.models.spec import ModelSpec
from xorl.core.models.stacks import ExpertStack
from xorl.core.nn.moe import RouterConfig
from xorl.kernels.experts.gates import GELU_TANH

ARCHITECTURE = "Gemma4ForCausalLM"
# The text_config of a composite model leaves out what it has of these.
DEFAULTS: Mapping[str, object] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        rotary_gated.SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        rotary_gated.FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
# Keys of what is refused above, or of what a model does not have.
OF_OTHER_SIZES = (
    "use_double_wide_mlp",
    "vocab_size_per_layer_input",
    "num_experts",
    "top_k_experts",
    "moe_intermediate_size",
)
# Files have the feed-forward block where other families have shared experts.
MODULES: Mapping[str, str] = {
    **rotary_gated.AROUND_BLOCKS,
    **mixtures.shared_names("mlp"),
    "mlp.gate.scales": "router",
    "mlp.experts_input_norm": "pre_feedforward_layernorm_2",
    "mlp.experts_output_norm": "post_feedforward_layernorm_2",
    "mlp.shared_output_norm": "post_feedforward_layernorm_1",
}
EXPERT_NAMES = replace(rotary_gated.EXPERT_NAMES, router="router.proj", stack=ExpertStack(module="experts"))
# By default, every sixth layer has no window.
PERIOD = 6


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. Scores are not scaled."""
    hf = HFConfig(values, ARCHITECTURE, **DEFAULTS)
    hf.refuse("num_kv_shared_layers", "layers that read the keys and values of earlier ones are not implemented")
    hf.refuse("hidden_size_per_layer_input", "embeddings for each layer are not implemented")
    if hf.has("use_bidirectional_attention"):
        hf.expect("use_bidirectional_attention", hf.get("use_bidirectional_attention", str), ["vision"])
    num_layers, length = hf.positive("num_hidden_layers"), hf.positive("max_position_embeddings")
    full, sliding = (
        read_rope_of_type(hf, each, 1e4, length, {**ROPE_TYPES, "proportional": "proportional"}, is_scaled=False)
        for each in (rotary_gated.FULL, rotary_gated.SLIDING)
    )
    pattern = [rotary_gated.SLIDING if (index + 1) % PERIOD else rotary_gated.FULL for index in range(num_layers)]
    windows = rotary_gated.windows_of(hf, pattern)
    bias = hf.get("attention_bias", bool, False)
    ffn = rotary_gated.read_dense(hf, activation_key="hidden_activation", activation="gelu_pytorch_tanh")
    config = rotary_gated.read_config(
        hf,
        rope=full,
        norms="sandwich",
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        # The last layer never has one.
        windows=(*windows[:-1], None),
        ffns=[_with_experts(hf, ffn) if hf.get("enable_moe_block", bool, False) else ffn] * num_layers,
    )
    config = _with_heads(hf, config.with_ropes(full, sliding))
    softcap = hf.cap("final_logit_softcapping")
    hf.finish(inert=OF_OTHER_SIZES)
    config = config.with_layers(lambda _, layer: replace(layer, output_scale=True))
    return replace(config, embed_scale=config.hidden_size**0.5, logit_softcap=softcap)


def _with_experts(hf: HFConfig, shared: DenseConfig) -> ExpertsConfig:
    """Experts beside a feed-forward block."""
    hf.expect("hidden_activation", shared.activation, ["gelu_pytorch_tanh"])
    return ExpertsConfig(
        hf.positive("num_experts"),
        hf.positive("top_k_experts"),
        hf.positive("moe_intermediate_size"),
        RouterConfig(normalize=True, scaled_eps=hf.get("rms_norm_eps", float, 1e-6)),
        GELU_TANH,
        shared=shared,
        own_norms=True,
    )


def _with_heads(hf: HFConfig, config: DecoderConfig) -> DecoderConfig:
    """The configuration with the heads of each layer.

    config.json has those of layers without a window in `global_head_dim` and `num_global_key_value_heads`, or the
    differences of each layer in `per_layer_config`.
    """
    shares_keys = hf.get("attention_k_eq_v", bool, False)
    head_dim, num_kv_heads = hf.positive("head_dim"), hf.positive("num_key_value_heads")
    full_head_dim, full_kv_heads = hf.positive("global_head_dim"), num_kv_heads
    if hf.has("num_global_key_value_heads") and shares_keys:
        full_kv_heads = hf.positive("num_global_key_value_heads")
    is_by_layer = hf.has("per_layer_config")
    entries = hf.by_layer("per_layer_config", config.num_layers)

    def change(index: int, layer: LayerConfig) -> LayerConfig:
        is_full = layer.attention.window is None
        entry = entries[index]
        given = (full_head_dim, full_kv_heads) if is_full and not is_by_layer else (head_dim, num_kv_heads)
        attention = replace(
            layer.attention,
            head_dim=entry.positive("head_dim", given[0]),
            num_kv_heads=entry.positive("num_key_value_heads", given[1]),
            scale=1.0,
            v_norm=True,
            v_is_k=is_full and shares_keys,
        )
        entry.refuse_unread()
        return replace(layer, mixer=attention)

    return config.with_layers(change)


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="gemma4_text",
    config_from_hf=config_from_hf,
    checkpoint_names=replace(rotary_gated.CHECKPOINT_NAMES, modules=MODULES, experts=EXPERT_NAMES),
    adapter_targets=("q_proj", "k_proj", "v_proj", "o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    composites=("Gemma4ForConditionalGeneration",),
)
