"""The tiny models of the tests: what config.json says of one. Without torch and xorl, so that any test can have it."""

import json
from collections.abc import Mapping
from pathlib import Path

ARCHITECTURES = {
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "solar_open": "SolarOpenForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
# Ten times that of real models, so that neighbours and positions show in what such narrow ones compute.
INITIALIZER_RANGE = 0.2


def hf_config(model_type: str = "qwen3", /, **changes: object) -> dict[str, object]:
    """Of a family: vocabulary 64, width 32, two layers, four heads, two of them for keys, unless `changes` differ."""
    sizes = _GPT2 if model_type == "gpt2" else _GATED
    config = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": 64,
        **sizes,
        **_EXPERTS.get(model_type, {}),
        **_OWN.get(model_type, {}),
        "initializer_range": INITIALIZER_RANGE,
        **changes,
    }
    if model_type == "qwen3" and "head_dim" not in changes:
        # Without it, this family has 128.
        hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
        assert isinstance(hidden_size, int)
        assert isinstance(num_heads, int)
        config["head_dim"] = hidden_size // num_heads
    return config


def write_config(folder: Path, config: Mapping[str, object]) -> Path:
    """The folder, made where it is not there, with such a config.json and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


_GATED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_GROUPED = {**_GROUPS, "n_shared_experts": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True}
_BESIDE_GATED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}
_EXPERTS: dict[str, dict[str, object]] = {
    "dots1": _GROUPED,
    "deepseek_v3": {**_GROUPED, "first_k_dense_replace": 0},
    "glm4_moe": {**_GROUPED, "first_k_dense_replace": 1},
    "glm4_moe_lite": _GROUPED,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "swiglu_limit": 0.9},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "qwen2_moe": _BESIDE_GATED,
    "qwen3_5_moe_text": _BESIDE_GATED,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "qwen3_next": _BESIDE_GATED,
    "solar_open": _GROUPED,
}
# What these families would otherwise have of the size of real models.
_NARROW = {"head_dim": 8, "pad_token_id": None}
_WINDOWS = {"sliding_window": 4, "sliding_window_pattern": 2}
# Short and of a small base, so that positions show.
_SCALED = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LATENTS = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_DELTA = {
    **_NARROW,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_OWN: dict[str, dict[str, object]] = {
    "apertus": {"rope_parameters": _SCALED},
    "cohere2": {**_NARROW, **_WINDOWS},
    "ernie4_5": _NARROW,
    "exaone4": _WINDOWS,
    "gemma2": {**_NARROW, "sliding_window": 4},
    "gemma3_text": {**_NARROW, **_WINDOWS},
    "gemma4_text": {
        **_NARROW,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 4,
        "hidden_size_per_layer_input": 0,
    },
    "glm4": _NARROW,
    "gpt_oss": {**_NARROW, "sliding_window": 4, "rope_parameters": _YARN},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "granitemoehybrid": {
        "num_local_experts": 0,
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_state": 8,
        "shared_intermediate_size": 32,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "glm4_moe": {"use_qk_norm": True},
    "deepseek_v3": _LATENTS,
    "glm4_moe_lite": _LATENTS,
    "lfm2": {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False, "pad_token_id": None},
    "minimax_m2": {"head_dim": 8, "rotary_dim": 4},
    "ministral3": _NARROW,
    "nemotron_h": {
        "head_dim": 8,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 4,
        "ssm_state_size": 8,
        "n_groups": 4,
    },
    "olmo3": _WINDOWS,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "phi3": {"pad_token_id": None},
    "seed_oss": _NARROW,
    "smollm3": {"pad_token_id": None, "no_rope_layer_interval": 2},
    "solar_open": {"head_dim": 8},
}
# Changes of `gemma4_text`: experts beside its feed-forward block.
BESIDE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
# Changes of `nemotron_h`: experts without gates, on latents.
LATENT_EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 32,
    "moe_latent_size": 16,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
