"""Nemotron-H: layers of one block each: a state space, attention without positions, feed-forward, or experts."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import mixtures, rotary_gated, state_spaces
from xorl.core.models.decoder_config import DecoderConfig, DenseConfig, ExpertsConfig, LayerConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.models.stacks import ExpertNames
from xorl.core.nn import AttentionConfig, NormConfig
from xorl.core.nn.moe import RouterConfig
from xorl.core.nn.state_space import StateSpaceConfig
from xorl.kernels.experts.gates import RELU2

ARCHITECTURE = "NemotronHForCausalLM"
DEFAULTS: Mapping[str, object] = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 21_504,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "time_step_min": 1e-3,
}
DENSE, EXPERTS = "mlp", "moe"
# The kinds of layers, by the letters of `hybrid_override_pattern`.
LETTERS: Mapping[str, str] = {"M": state_spaces.STATES, "*": rotary_gated.FULL, "-": DENSE, "E": EXPERTS}
MODULES: Mapping[str, str] = {
    "model.embed_tokens": "model.embeddings",
    "model.norm": "model.norm_f",
    "input_layernorm": "norm",
    **{f"self_attn.{name}_proj": f"mixer.{name}_proj" for name in "qkvo"},
    **state_spaces.module_names("mixer"),
    **{f"mlp.{name}_proj": f"mixer.{name}_proj" for name in ("up", "down")},
    **{f"mlp.shared_experts.{name}_proj": f"mixer.shared_experts.{name}_proj" for name in ("up", "down")},
    "mlp.latent_in": "mixer.fc1_latent_proj",
    "mlp.latent_out": "mixer.fc2_latent_proj",
}
NAMES_OF_EXPERTS = ExpertNames(
    "mixer.gate", "mixer.experts.{}", "", "up_proj", "down_proj", "mixer.gate.e_score_correction_bias"
)
# Keys of experts, which have no effect in a model without any.
OF_EXPERTS = (
    *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("num_experts_per_tok", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob", "moe_latent_size"),
)
# Keys of kernels, initial values, generation and multi-token prediction, and those that transformers ignores.
INERT = (
    "output_router_logits",
    *("chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "num_logits_to_keep"),
    *("rescale_prenorm_residual", "time_step_max", "time_step_floor", "time_step_limit", "time_step_rank"),
    *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    *("expand", "rms_norm_eps", "num_hidden_layers", "sliding_window"),
)


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json."""
    hf = HFConfig(values, ARCHITECTURE, **DEFAULTS)
    hf.warn_about_dropout()
    hf.refuse("residual_in_fp32", "residuals have the dtype of activations")
    for key in ("attention_bias", "mamba_proj_bias"):
        hf.refuse(key, "transformers has no such biases in this family")
    hf.expect("tie_word_embeddings", hf.get("tie_word_embeddings", bool, False), [False])
    head_dim = hf.positive("head_dim")
    blocks = {
        state_spaces.STATES: LayerConfig(_read_states(hf), None),
        rotary_gated.FULL: LayerConfig(_read_attention(hf, head_dim), None),
        DENSE: LayerConfig(None, _read_dense(hf)),
    }
    types = _read_types(hf, (*blocks, EXPERTS))
    if EXPERTS in types:
        blocks[EXPERTS] = LayerConfig(None, _read_experts(hf))
    config = DecoderConfig(
        vocab_size=hf.positive("vocab_size"),
        hidden_size=hf.positive("hidden_size"),
        layers=tuple(blocks[each] for each in types),
        max_position_embeddings=hf.positive("max_position_embeddings"),
        learned_positions=False,
        norm=NormConfig("rms", hf.get("layer_norm_epsilon", float, 1e-5)),
        tie_word_embeddings=False,
        initializer_range=hf.get("initializer_range", float, 0.02),
        scale_residual_init=False,
    )
    hf.finish(inert=(*INERT, *OF_EXPERTS), fixed={"attention_head_dim": head_dim})
    return config


def _read_types(hf: HFConfig, allowed: tuple[str, ...]) -> list[str]:
    """The kind of each layer, from `layers_block_type`, or from the letters of `hybrid_override_pattern`."""
    if hf.has("layers_block_type"):
        hf.has("hybrid_override_pattern")
        return state_spaces.read_types(hf, "layers_block_type", allowed)
    if not hf.has("hybrid_override_pattern"):
        return [state_spaces.STATES, EXPERTS, rotary_gated.FULL, DENSE]
    letters = hf.get("hybrid_override_pattern", str)
    return [LETTERS[hf.expect("each letter of hybrid_override_pattern", letter, LETTERS)] for letter in letters]


def _read_states(hf: HFConfig) -> StateSpaceConfig:
    hf.expect("mamba_hidden_act", hf.get("mamba_hidden_act", str, "silu"), ["silu"])
    num_heads, num_groups = hf.positive("mamba_num_heads"), hf.positive("n_groups")
    if num_heads % num_groups:
        raise ValueError(f"{hf.architecture}: mamba_num_heads: {num_heads} is not a multiple of n_groups: {num_groups}")
    return StateSpaceConfig(
        num_heads,
        num_groups,
        hf.positive("mamba_head_dim"),
        hf.positive("ssm_state_size"),
        hf.positive("conv_kernel"),
        bias=hf.get("use_bias", bool, False),
        conv_bias=hf.get("use_conv_bias", bool, True),
        min_step=hf.get("time_step_min", float),
    )


def _read_attention(hf: HFConfig, head_dim: int) -> AttentionConfig:
    return AttentionConfig(
        num_heads=hf.positive("num_attention_heads"),
        num_kv_heads=hf.positive("num_key_value_heads"),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=None,
        rope=None,
        qk_norm=None,
        qkv_bias=False,
        o_bias=False,
    )


def _read_experts(hf: HFConfig) -> ExpertsConfig:
    """Experts without gates, which may compute on narrower latents, and a shared block for all tokens."""
    hf.expect("mlp_hidden_act", hf.get("mlp_hidden_act", str, "relu2"), ["relu2"])
    bias = hf.get("mlp_bias", bool, False)
    defaults = ExpertsConfig(8, 2, 7688, RouterConfig(normalize=True), gate=RELU2)
    experts = mixtures.read_grouped_experts(hf, defaults)
    return replace(
        experts,
        shared=DenseConfig("plain", hf.positive("moe_shared_expert_intermediate_size", 7688), "relu2", bias),
        latent=hf.positive("moe_latent_size") if hf.has("moe_latent_size") else None,
        latent_bias=bias,
    )


def _read_dense(hf: HFConfig) -> DenseConfig:
    activation = hf.activation("mlp_hidden_act", "relu2")
    return DenseConfig("plain", hf.positive("intermediate_size"), activation, hf.get("mlp_bias", bool, False))


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="nemotron_h",
    config_from_hf=config_from_hf,
    checkpoint_names=replace(
        rotary_gated.CHECKPOINT_NAMES,
        embedding="model.embeddings.weight",
        experts=NAMES_OF_EXPERTS,
        modules=MODULES,
        unused=r"mtp\.",
        spellings={"backbone.": "model."},
    ),
    # PEFT loads no adapter on the out_proj of a state space.
    adapter_targets=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "mixer.up_proj", "mixer.down_proj"),
)
