"""The table of models and of the runs that layouts compute: see layouts.py. A new family is a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from image_models import IMAGE_MODELS, IMAGE_RUNS
from tiny_models import BESIDE, LATENT_EXPERTS, hf_config

Options = Mapping[str, object]
NO_OPTIONS: Options = MappingProxyType({})

# One family of each kind: where norms stand and what they normalise, which layers rotate and how, scales, biases,
# trained scalars.
FAMILIES = (
    "apertus",
    "cohere2",
    "deepseek_v3",
    "exaone4",
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "granite",
    "olmo2",
    "smollm3",
    "starcoder2",
)
# Layers whose state passes through a document, which a ring cannot compute.
RECURRENT = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2", "nemotron_h")
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
MODELS: dict[str, dict[str, object]] = {
    "llama": hf_config("llama", max_position_embeddings=20, rope_parameters=DYNAMIC),
    "qwen3": hf_config("qwen3", num_attention_heads=8, num_key_value_heads=2, intermediate_size=64),
    **IMAGE_MODELS,
    "one head": hf_config("llama", num_key_value_heads=1),
    # Four ranks can share its matrices in blocks of 16.
    "blocks": hf_config("qwen3", head_dim=16, intermediate_size=64),
    "mistral": hf_config("mistral", sliding_window=5),
    "gpt2": hf_config("gpt2"),
    "qwen3_moe": hf_config(
        "qwen3_moe",
        moe_intermediate_size=48,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        pad_token_id=3,
    ),
    "mixtral": hf_config("mixtral"),
    "glm4_moe": hf_config("glm4_moe", moe_intermediate_size=48),
    "qwen2_moe": hf_config("qwen2_moe", mlp_only_layers=[1]),
    "deepseek_v3, experts": hf_config("deepseek_v3", first_k_dense_replace=1),
    "gemma4_text, experts": hf_config("gemma4_text", **BESIDE),
    "nemotron_h, experts": hf_config("nemotron_h", **LATENT_EXPERTS),
    "granitemoehybrid": hf_config(
        "granitemoehybrid", num_local_experts=4, intermediate_size=24, output_router_logits=True
    ),
    "gpt_oss": hf_config("gpt_oss", intermediate_size=32, output_router_logits=True, router_aux_loss_coef=0.1),
    "gemma2": hf_config("gemma2", attn_logit_softcapping=0.05),
    **{name: hf_config(name) for name in FAMILIES},
    **{name: hf_config(name, intermediate_size=64) for name in RECURRENT},
    "deepseek_v3": hf_config("deepseek_v3", first_k_dense_replace=2),
    "gpt2, 4 layers": hf_config("gpt2", n_layer=4),
    "llama, 4 layers": hf_config("llama", num_hidden_layers=4),
    "qwen3_moe, 4 layers": hf_config(
        "qwen3_moe",
        num_hidden_layers=4,
        mlp_only_layers=[0, 2],
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    ),
}


@dataclass(frozen=True)
class Run:
    """A model and the options of sections train and lora that every layout computes it with."""

    model: str
    train: Options = field(default_factory=dict)
    lora: Options = field(default_factory=dict)


LORA = {"enable_lora": True, "lora_rank": 4, "lora_target_modules": "all-linear"}
QLORA = {**LORA, "enable_qlora": True, "quant_format": "nf4", "quant_group_size": 16}
EXPERT_LORA = {**LORA, "lora_target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}
MUON = {"optimizer": "muon"}
RECOMPUTE = {"enable_gradient_checkpointing": True}
BY_OPERATION = {**RECOMPUTE, "recompute_policy": "operation"}
MOE_ACT = {"moe_checkpoint_method": "moe_act"}
RUNS: dict[str, Run] = {
    "llama": Run("llama"),
    "llama, LoRA": Run("llama", lora=LORA),
    "qwen3": Run("qwen3"),
    "qwen3, LoRA": Run("qwen3", MUON, LORA),
    "qwen3, tied LoRA": Run("qwen3", lora={**LORA, "lora_target_modules": ["q_proj", "down_proj", "embed_tokens"]}),
    "qwen3, DoRA": Run("qwen3", lora={**LORA, "use_dora": True, "modules_to_save": ["model.norm"]}),
    "qwen3, LoRA, both ends": Run("qwen3", lora={**LORA, "lora_target_modules": ["v_proj", "embed_tokens", "lm_head"]}),
    "qwen3, QLoRA": Run("qwen3", lora=QLORA),
    "qwen3, nvfp4": Run("qwen3", lora={**QLORA, "quant_format": "nvfp4"}),
    "block_fp8, noise": Run("blocks", lora={**QLORA, "quant_format": "block_fp8", "enable_aqn": True}),
    "noise": Run("blocks", lora={**QLORA, "enable_aqn": True}),
    "qwen3, operation": Run("qwen3", BY_OPERATION),
    "qwen3, Muon": Run("qwen3", {**MUON, **BY_OPERATION}),
    "one key/value head": Run("one head", MUON, {**LORA, "lora_target_modules": ["q_proj", "v_proj"]}),
    "mistral": Run("mistral"),
    "gpt2": Run("gpt2", RECOMPUTE),
    "qwen3, layer": Run("qwen3", RECOMPUTE),
    "qwen3, first layer": Run("qwen3", {**RECOMPUTE, "recompute_num_layers": 1}),
    "qwen3, reentrant": Run("qwen3", {**RECOMPUTE, "enable_reentrant": True}),
    "qwen3, mlp": Run("qwen3", {**RECOMPUTE, "recompute_modules": ["mlp"]}),
    # Capped scores.
    "gemma2": Run("gemma2"),
    "mixtral, Muon": Run("mixtral", MUON),
    "qwen3_moe": Run("qwen3_moe", {"router_z_loss_coef": 0.1}),
    "qwen3_moe, recomputed": Run("qwen3_moe", RECOMPUTE),
    "qwen3_moe, moe_act": Run("qwen3_moe", {**RECOMPUTE, **MOE_ACT}),
    "qwen3_moe, operation": Run("qwen3_moe", BY_OPERATION),
    "qwen3_moe, operation and moe_act": Run("qwen3_moe", {**BY_OPERATION, **MOE_ACT}),
    "qwen3_moe, LoRA": Run("qwen3_moe", lora=LORA),
    "qwen3_moe, adapted experts": Run("qwen3_moe", MUON, EXPERT_LORA),
    "qwen3_moe, adapted experts, recomputed": Run("qwen3_moe", RECOMPUTE, EXPERT_LORA),
    "qwen3_moe, QLoRA": Run("qwen3_moe", lora=QLORA),
    "qwen3_moe, QLoRA, adapted experts": Run("qwen3_moe", RECOMPUTE, {**QLORA, **EXPERT_LORA}),
    "qwen3_moe, shared adapters": Run("qwen3_moe", MUON, {**EXPERT_LORA, "moe_shared_lora": True}),
    "qwen3_moe, outer factors shared": Run("qwen3_moe", RECOMPUTE, {**EXPERT_LORA, "moe_hybrid_shared_lora": True}),
}
RUNS |= {name: Run(name) for name in FAMILIES}
# Scores that are corrected and grouped, and shared experts.
RUNS |= {
    "glm4_moe": Run("glm4_moe", {**MUON, "router_aux_loss_coef": 0.1}),
    "glm4_moe, adapted experts": Run("glm4_moe", RECOMPUTE, EXPERT_LORA),
    "glm4_moe, QLoRA": Run("glm4_moe", lora={**QLORA, **EXPERT_LORA}),
    "qwen2_moe": Run("qwen2_moe"),
    "deepseek_v3, experts": Run("deepseek_v3, experts", BY_OPERATION),
    # Experts beside a feed-forward block, with norms of their own.
    "gemma4_text, experts": Run("gemma4_text, experts", {"router_z_loss_coef": 0.1}),
    "gemma4_text, adapted experts": Run("gemma4_text, experts", RECOMPUTE, EXPERT_LORA),
    # Sinks, and experts with biases.
    "gpt_oss": Run("gpt_oss", MUON),
    "gpt_oss, adapted experts": Run("gpt_oss", {**RECOMPUTE, **MOE_ACT}, EXPERT_LORA),
    "gpt_oss, QLoRA": Run("gpt_oss", lora={**QLORA, **EXPERT_LORA}),
}
RUNS |= {
    "qwen3_5": Run("qwen3_5_text", BY_OPERATION),
    "qwen3_5, Muon": Run("qwen3_5_text", {**MUON, **RECOMPUTE, "recompute_modules": ["self_attn"]}),
    "qwen3_5, LoRA": Run("qwen3_5_text", lora=LORA),
    "qwen3_5, QLoRA": Run("qwen3_5_text", lora=QLORA),
    "lfm2": Run("lfm2", MUON, LORA),
    "qwen3_5_moe": Run("qwen3_5_moe_text", {**RECOMPUTE, "router_aux_loss_coef": 0.1}),
    "qwen3_next": Run("qwen3_next"),
    "qwen3_next, LoRA": Run("qwen3_next", lora=LORA),
    "nemotron_h": Run("nemotron_h", {**MUON, **RECOMPUTE, "recompute_modules": ["self_attn"]}),
    "nemotron_h, LoRA": Run("nemotron_h", lora=LORA),
    "nemotron_h, experts": Run("nemotron_h, experts", RECOMPUTE),
    "granitemoehybrid": Run("granitemoehybrid", {"router_aux_loss_coef": 0.1}),
}
HYBRIDS = ("qwen3_5", "qwen3_5, Muon", "qwen3_5, LoRA", "qwen3_5, QLoRA", "lfm2", "nemotron_h")
RUNS |= {
    "pipeline: gpt2": Run("gpt2, 4 layers"),
    "pipeline: llama": Run("llama, 4 layers", BY_OPERATION),
    "pipeline: LoRA": Run("llama, 4 layers", lora=LORA),
    # Some stages have nothing to train.
    "pipeline: the last layer": Run("llama, 4 layers", lora={**LORA, "lora_target_modules": ["3.self_attn.q_proj"]}),
    "pipeline: the first layer": Run("llama, 4 layers", lora={**LORA, "lora_target_modules": ["0.self_attn.q_proj"]}),
    "pipeline: qwen3_moe": Run("qwen3_moe, 4 layers", {"router_z_loss_coef": 0.1}),
}
FEW_STAGED = ("pipeline: gpt2", "pipeline: llama", "pipeline: the last layer", "pipeline: qwen3_moe")
STAGED_HYBRIDS = ("qwen3_5", "qwen3_5, LoRA", "lfm2", "nemotron_h")
BESIDE_BLOCK = ("gemma4_text, experts", "gemma4_text, adapted experts")
# Losses of pairs of answers; adapters are switched off for the reference model.
RUNS |= {
    "dpo": Run("llama", {"loss": "dpo"}),
    "dpo, LoRA": Run("qwen3", {"loss": "dpo", "dpo_length_normalized": True}, LORA),
    "dpo, adapted experts": Run("qwen3_moe", {"loss": "dpo", **RECOMPUTE}, EXPERT_LORA),
    "kto": Run("llama", {"loss": "kto"}),
    "kto, LoRA": Run("qwen3", {"loss": "kto", **BY_OPERATION}, LORA),
    "orpo": Run("gpt2", {"loss": "orpo"}),
    "simpo": Run("qwen3_moe", {"loss": "simpo", "preference_label_smoothing": 0.1}),
}
RUNS |= {name: Run(*each) for name, each in IMAGE_RUNS.items()}
# Each loss, with and without adapters, where rows are whole; what differs where they are shared.
PREFERENCES = ("dpo", "dpo, LoRA", "dpo, adapted experts", "kto", "kto, LoRA", "orpo", "simpo")
SOME_PREFERENCES = ("dpo, LoRA", "kto", "orpo")
GPT_OSS = ("gpt_oss", "gpt_oss, adapted experts", "gpt_oss, QLoRA")
PIPELINE = tuple(name for name in RUNS if name.startswith("pipeline"))
SHARED = ("qwen3_moe, shared adapters", "qwen3_moe, outer factors shared")
# Ways to recompute a model.
RECOMPUTED = ("qwen3, operation", "qwen3, layer", "qwen3, first layer", "qwen3, reentrant", "qwen3, mlp")
# A tied head, and one of its own that is recomputed; experts; adapters. They are split over ranks in each way.
SPLIT = ("gpt2", "qwen3, layer", "qwen3_moe", "llama, LoRA")
SPLIT_LORA = ("qwen3, DoRA", "qwen3, LoRA, both ends")
# Of full weights, whose rows or heads may be divided in several ways, and of adapters. Where four ranks divide rows,
# each has one of them: parameters are placed alike on two.
CONTEXT = ADAPTED, FULL = ("llama, LoRA", "qwen3_moe")
ALL_CONTEXT = (
    *FAMILIES,
    *(
        name
        for name, run in RUNS.items()
        if run.model in ("llama", "qwen3", "mistral", "gpt2")
        and "loss" not in run.train
        and name not in (*RECOMPUTED[1:], *SPLIT_LORA[1:])
    ),
    "qwen3_moe",
    "qwen3_moe, operation and moe_act",
)
# Windows, learned positions, norms over all heads, layers without a rotation, scales, caps, sinks, pairs of answers.
FEW_CONTEXT = ("mistral", "gpt2", "olmo2", "smollm3", "gemma4_text", "gemma2", "gpt_oss", "dpo, LoRA")
# How layers are ordered, weights are stored and updated does not depend on how rows are divided: Ulysses has the other
# runs. Stages divide no layer. For both: windows and rotations by layer, widths of values, scales.
FEW_FAMILIES = ("cohere2", "deepseek_v3", "gemma4_text", "granite", "smollm3")
RING_RUNS = (
    *FEW_FAMILIES,
    "llama, LoRA",
    "qwen3, operation",
    "qwen3, QLoRA",
    "mistral",
    "gpt2",
    "gemma2",
    *ALL_CONTEXT[-2:],
)
FEW_EXPERTS = ("qwen3_moe", "mixtral, Muon", "qwen3_moe, adapted experts")
EXPERTS = (*FEW_EXPERTS, "qwen3_moe, outer factors shared")
# Of ranks that gather all tokens.
GATHERED = (
    "qwen3_moe",
    "qwen3_moe, recomputed",
    "qwen3_moe, operation",
    "qwen3_moe, QLoRA, adapted experts",
    "qwen3_moe, outer factors shared",
)
TENSOR = (
    "llama, LoRA",
    "qwen3, LoRA",
    "qwen3, Muon",
    "qwen3, tied LoRA",
    "qwen3, QLoRA",
    "qwen3, nvfp4",
    "block_fp8, noise",
    "noise",
    "qwen3, operation",
    "mistral",
    "gpt2",
    *FAMILIES,
)
TENSOR_EXPERTS = (
    "qwen3_moe",
    "mixtral, Muon",
    "qwen3_moe, recomputed",
    "qwen3_moe, LoRA",
    "qwen3_moe, outer factors shared",
)
ALL_EXPERTS = tuple(
    name
    for name, run in RUNS.items()
    if run.model in ("qwen3_moe", "mixtral")
    and name not in (*ALL_CONTEXT[-1:], "qwen3_moe, LoRA", "qwen3_moe, adapted experts, recomputed")
    and "loss" not in run.train
)
OTHER_EXPERTS = (
    "glm4_moe",
    "glm4_moe, QLoRA",
    "qwen3_next",
    "granitemoehybrid",
    "nemotron_h, experts",
    "deepseek_v3, experts",
    *BESIDE_BLOCK,
    *GPT_OSS,
)
SOME_EXPERTS = (
    "qwen3_moe",
    "qwen3_moe, operation and moe_act",
    "gpt_oss",
    "deepseek_v3, experts",
    "gemma4_text, experts",
)
STAGED = (
    *PIPELINE,
    *FEW_FAMILIES,
    "qwen3, LoRA",
    "qwen3, Muon",
    "qwen3, tied LoRA",
    "qwen3, DoRA",
    "qwen3, QLoRA",
    "mixtral, Muon",
    "qwen3_moe, adapted experts, recomputed",
)
