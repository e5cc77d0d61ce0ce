"""Variants of the models of `hf_cases` that have recurrences."""

from collections.abc import Mapping

Variant = tuple[str, str, dict[str, object]]
_DELTA: dict[str, object] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_conv_kernel_dim": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5},
}
_CONV: dict[str, object] = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}
_MAMBA: dict[str, object] = {"mamba_num_heads": 4, "mamba_head_dim": 6, "ssm_state_size": 5, "head_dim": 16}
_GRANITE: dict[str, object] = {
    "mamba_n_heads": 6,
    "mamba_d_state": 5,
    "shared_intermediate_size": 36,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}


def recurrent_variants(eps: float, gated: Mapping[str, object]) -> list[Variant]:
    """The architecture, a label and changes of the config of each. gated: experts beside one with a gate."""
    tied = {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "layer_types": ["full_attention", "linear_attention"] * 2,
        "linear_num_value_heads": 2,
    }
    some_dense = {"mlp_only_layers": [0], "norm_topk_prob": False, "linear_num_key_heads": 4}
    conv = {**_CONV, "norm_eps": eps}
    biases = {
        "pad_token_id": None,
        "conv_bias": True,
        "conv_L_cache": 4,
        "tie_word_embeddings": False,
        "block_auto_adjust_ff_dim": False,
    }
    mamba = {**_MAMBA, "layer_norm_epsilon": eps}
    each_kind = {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "n_groups": 2,
        "time_step_min": 0.4,
    }
    one_group = {
        "layers_block_type": ["mlp", "linear_attention", "full_attention"],
        "n_groups": 1,
        "time_step_min": 0.3,
        "use_bias": True,
        "use_conv_bias": False,
        "mlp_bias": True,
        "mlp_hidden_act": "silu",
        "conv_kernel": 3,
    }
    experts = {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "n_groups": 2,
        "time_step_min": 0.4,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 28,
        "moe_shared_expert_intermediate_size": 20,
        "moe_latent_size": 24,
        "routed_scaling_factor": 1.7,
        "mlp_bias": False,
    }
    granite = {**_GRANITE, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    one_block = {
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e2},
        "time_step_limit": [1.1, 1.6],
        "mamba_d_conv": 3,
        "mamba_conv_bias": False,
        "attention_bias": True,
        "tie_word_embeddings": True,
    }
    return [
        ("Qwen3_5ForCausalLM", "every fourth attends", _DELTA),
        ("Qwen3_5ForCausalLM", "tied, biases", {**_DELTA, **tied}),
        ("Qwen3_5MoeForCausalLM", "every fourth attends", {**_DELTA, **gated}),
        ("Qwen3NextForCausalLM", "every fourth attends", {**_DELTA, **gated}),
        ("Qwen3NextForCausalLM", "some dense", {**_DELTA, **gated, **some_dense}),
        ("Lfm2ForCausalLM", "some attend", {**conv, "block_ffn_dim_multiplier": 1.4}),
        ("Lfm2ForCausalLM", "biases, untied", {**conv, **biases}),
        ("NemotronHForCausalLM", "each kind of layer", {**mamba, **each_kind}),
        ("NemotronHForCausalLM", "biases, one group", {**mamba, **one_group}),
        ("NemotronHForCausalLM", "experts on latents", {**mamba, **experts}),
        (
            "NemotronHForCausalLM",
            "experts",
            {**mamba, **experts, "moe_latent_size": None, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        ),
        ("GraniteMoeHybridForCausalLM", "some attend", {**granite, "num_local_experts": 5, "intermediate_size": 28}),
        ("GraniteMoeHybridForCausalLM", "without experts", {**granite, **one_block}),
    ]
