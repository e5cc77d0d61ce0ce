"""The models of all families that tests compare with transformers: variants of config.json, weights, a packed row."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor

from recurrent_cases import recurrent_variants
from xorl.core.models import Decoder, spec_for
from xorl.core.models.recipes import WeightRecipe
from xorl.core.nn import LayerKernels
from xorl.kernels.attention import ATTENTION, resolve_attention
from xorl.lora.peft import InMemoryTensors

VOCAB = 83
LENGTHS = [23, 1, 40, 9]
# So large that it shows.
EPS = 1e-3
SIZES: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # An id of `make_rows`, whose row of the embedding gets no gradient from the embedding, except in one family.
    "pad_token_id": 22,
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_epsilon"), EPS),
}
GPT2_SIZES: dict[str, object] = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "layer_norm_epsilon": EPS,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The trained length is shorter than the documents, so that scaling shows.
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e2,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 1.0,
    "beta_slow": 0.4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e3,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}


def known_to(config_class: type[transformers.PretrainedConfig], values: Mapping[str, object]) -> dict[str, object]:
    """Without the keys that a configuration class does not have: config.json may not contain them."""
    default = config_class()

    def is_known(key: str) -> bool:
        try:
            return hasattr(default, key)
        except RuntimeError:  # it differs between layers
            return True

    return {key: value for key, value in values.items() if is_known(key)}


@dataclass(frozen=True)
class Case:
    """One row of the table: a family and what its config changes."""

    architecture: str
    label: str
    changes: Mapping[str, object] = field(default_factory=dict)

    def hf_config(self) -> transformers.PretrainedConfig:
        sizes = GPT2_SIZES if self.architecture == "GPT2LMHeadModel" else SIZES
        config_class = getattr(transformers, self.architecture).config_class
        return config_class(**{**known_to(config_class, sizes), **self.changes}, attn_implementation="eager")

    def make_hf_model(self) -> transformers.PreTrainedModel:
        """The transformers model with random weights, biases and norms away from zero and one, and other constants."""
        torch.manual_seed(0)
        model = getattr(transformers, self.architecture)(self.hf_config())
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                scale = 0.15 if parameter.dim() > 1 else 0.1
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.2)
                elif name.endswith((".beta", ".eps")):
                    buffer.sub_(0.2)
                elif name.endswith(".layer_scalar"):
                    buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.2)
        return model.eval()


def state_of(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """The model's parameters and what else files hold, by name; tied weights once."""
    kept = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    return {**dict(model.named_parameters()), **kept}


# What transformers renames when it reads files, and not because it stacks.
_IN_FILES = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}


def renamed(tensors: Mapping[str, Tensor], *, in_files: bool) -> dict[str, Tensor]:
    """Tensors under the names in files, or under those in memory."""
    table = _IN_FILES if in_files else {value: key for key, value in _IN_FILES.items()}

    def of(name: str) -> str:
        found = next((each for each in table if name.endswith(f".{each}")), None)
        return name if found is None else name.removesuffix(found) + table[found]

    found = {of(name): tensor for name, tensor in tensors.items()}
    for name in [
        each for each in found if in_files and each.endswith((".mixer.experts.up_proj", ".mixer.experts.down_proj"))
    ]:
        module, _, last = name.rpartition(".")
        found |= {f"{module}.{index}.{last}.weight": one for index, one in enumerate(found.pop(name))}
    return found


MIXTURE = {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
LOCAL = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 28}
CASES = [
    Case("LlamaForCausalLM", "grouped heads"),
    Case("LlamaForCausalLM", "all heads, tied", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    Case("LlamaForCausalLM", "one kv head", {"num_key_value_heads": 1, "head_dim": 20}),
    Case("LlamaForCausalLM", "biases", {"attention_bias": True, "mlp_bias": True}),
    Case("LlamaForCausalLM", "llama3 rope", {"rope_parameters": LLAMA3}),
    Case("LlamaForCausalLM", "linear rope", {"rope_parameters": LINEAR}),
    Case("LlamaForCausalLM", "dynamic rope", {"rope_parameters": DYNAMIC, "max_position_embeddings": 16}),
    Case("LlamaForCausalLM", "yarn rope", {"rope_parameters": YARN}),
    Case("LlamaForCausalLM", "gelu", {"hidden_act": "gelu"}),
    Case("Qwen2ForCausalLM", "grouped heads"),
    Case("Qwen2ForCausalLM", "tied", {"tie_word_embeddings": True}),
    Case("Qwen2ForCausalLM", "yarn rope", {"rope_parameters": YARN}),
    Case("Qwen2ForCausalLM", "sliding window", WINDOW),
    Case("Qwen3ForCausalLM", "grouped heads", {"head_dim": 16}),
    Case("Qwen3ForCausalLM", "tied", {"head_dim": 24, "tie_word_embeddings": True}),
    Case("Qwen3ForCausalLM", "biases", {"head_dim": 12, "attention_bias": True}),
    Case("Qwen3ForCausalLM", "yarn rope", {"head_dim": 16, "rope_parameters": {**YARN, "truncate": False}}),
    Case("Qwen3ForCausalLM", "sliding window", {"head_dim": 16, **WINDOW}),
    Case("MistralForCausalLM", "grouped heads", {"sliding_window": None}),
    Case("MistralForCausalLM", "sliding window", {"sliding_window": 6}),
    Case("Qwen3MoeForCausalLM", "grouped heads", MIXTURE),
    Case("Qwen3MoeForCausalLM", "one expert, biases", {**MIXTURE, "num_experts_per_tok": 1, "attention_bias": True}),
    Case("Qwen3MoeForCausalLM", "all experts", {**MIXTURE, "num_experts_per_tok": 5, "norm_topk_prob": True}),
    Case("Qwen3MoeForCausalLM", "some dense", {**MIXTURE, "mlp_only_layers": [0], "norm_topk_prob": True}),
    Case("Qwen3MoeForCausalLM", "every second", {**MIXTURE, "decoder_sparse_step": 2}),
    Case("MixtralForCausalLM", "grouped heads", LOCAL),
    Case("MixtralForCausalLM", "sliding window", {**LOCAL, "sliding_window": 6}),
    Case("GPT2LMHeadModel", "tied"),
    Case("GPT2LMHeadModel", "untied, inner width", {"tie_word_embeddings": False, "n_inner": 56}),
    Case("GPT2LMHeadModel", "scaled by layer", {"scale_attn_by_inverse_layer_idx": True}),
    Case("GPT2LMHeadModel", "unscaled, gelu", {"scale_attn_weights": False, "activation_function": "gelu"}),
]
NO_PADDING = {"pad_token_id": None}
CASES += [
    Case("LlamaForCausalLM", "no padding", NO_PADDING),
    Case("Qwen2ForCausalLM", "no padding, tied", {**NO_PADDING, "tie_word_embeddings": True}),
    Case("Qwen3ForCausalLM", "no padding", {"head_dim": 16, **NO_PADDING}),
    Case("Qwen3ForCausalLM", "padding from the end", {"head_dim": 16, "pad_token_id": -1}),
    Case("MistralForCausalLM", "no padding", {"sliding_window": None, **NO_PADDING}),
    Case("Qwen3MoeForCausalLM", "no padding", {**MIXTURE, **NO_PADDING}),
    Case("MixtralForCausalLM", "no padding", {**LOCAL, **NO_PADDING}),
    Case("GPT2LMHeadModel", "padding", {"pad_token_id": SIZES["pad_token_id"]}),
]
PATTERN = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}
CASES += [
    Case("Olmo2ForCausalLM", "grouped heads"),
    Case("Olmo2ForCausalLM", "biases, tied", {"attention_bias": True, "tie_word_embeddings": True}),
    Case("SmolLM3ForCausalLM", "grouped heads", {"no_rope_layers": [1, 0, 1]}),
    Case(
        "SmolLM3ForCausalLM",
        "interval, untied",
        {**NO_PADDING, "no_rope_layer_interval": 2, "tie_word_embeddings": False},
    ),
    Case(
        "SmolLM3ForCausalLM",
        "sliding window",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 7},
    ),
    Case("GraniteForCausalLM", "grouped heads", MULTIPLIERS),
    Case("GraniteForCausalLM", "tied, biases", {**MULTIPLIERS, "tie_word_embeddings": True, "attention_bias": True}),
    Case("SeedOssForCausalLM", "grouped heads", {"head_dim": 24}),
    Case("SeedOssForCausalLM", "output biases", {"head_dim": 12, "attention_bias": False, "attention_out_bias": True}),
    Case("ArceeForCausalLM", "grouped heads", {"head_dim": 12}),
    Case("ArceeForCausalLM", "biases", {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    Case("Glm4ForCausalLM", "grouped heads", {"head_dim": 16}),
    Case(
        "Glm4ForCausalLM",
        "a quarter rotates",
        {
            **NO_PADDING,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
            "attention_bias": False,
        },
    ),
    Case("Exaone4ForCausalLM", "sliding window", PATTERN),
    Case("Exaone4ForCausalLM", "grouped heads", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    Case("Exaone4ForCausalLM", "no rotation", {"sliding_window": 6, "layer_types": ["full_attention"] * 3}),
    Case("Ernie4_5ForCausalLM", "grouped heads", {"head_dim": 16}),
    Case("Ernie4_5ForCausalLM", "biases, untied", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False}),
    Case("Cohere2ForCausalLM", "sliding window", {**PATTERN, "head_dim": 16, "logit_scale": 0.2}),
    Case("Cohere2ForCausalLM", "untied", {**PATTERN, "head_dim": 12, "tie_word_embeddings": False}),
    Case("Starcoder2ForCausalLM", "sliding window", {"sliding_window": 9}),
    Case("Starcoder2ForCausalLM", "no biases, untied", {"use_bias": False, "tie_word_embeddings": False}),
]
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e3,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 16,
}
LONG |= {"long_factor": [1.5, 2.0, 3.0], "short_factor": [1.0, 1.1, 1.2]}
BY_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e3},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
}
GEMMA = {**PATTERN, "head_dim": 16, "query_pre_attn_scalar": 20, "rope_parameters": BY_TYPE}
WIDER = {
    "num_hidden_layers": 4,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e3},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    },
}
CAPPED = {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 4, "pad_token_id": None}
CAPPED |= {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
GROWING = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.1}
ALPHA = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e2}
CASES += [
    Case("Olmo3ForCausalLM", "sliding window", {**PATTERN, "rope_parameters": {**BY_TYPE, "full_attention": YARN}}),
    Case("Olmo3ForCausalLM", "one rotation", PATTERN),
    Case("Gemma2ForCausalLM", "sliding window", CAPPED),
    Case("Gemma2ForCausalLM", "untied, biases", {**CAPPED, "tie_word_embeddings": False, "attention_bias": True}),
    Case("Gemma2ForCausalLM", "no caps", {**CAPPED, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    Case("Gemma3ForCausalLM", "sliding window", GEMMA),
    Case("Gemma3ForCausalLM", "capped logits", {**GEMMA, "final_logit_softcapping": 2.0}),
    Case("Gemma3ForCausalLM", "untied, biases", {**GEMMA, "tie_word_embeddings": False, "attention_bias": True}),
    Case("Gemma4ForCausalLM", "sliding window", WIDER),
    Case(
        "Gemma4ForCausalLM",
        "own values, capped logits",
        {**WIDER, "attention_k_eq_v": False, "final_logit_softcapping": 2.0},
    ),
    Case("Gemma4ForCausalLM", "untied, biases", {**WIDER, "tie_word_embeddings": False, "attention_bias": True}),
    Case("Phi3ForCausalLM", "grouped heads"),
    Case(
        "Phi3ForCausalLM",
        "longrope",
        {**NO_PADDING, "sliding_window": 7, "original_max_position_embeddings": 16, "rope_parameters": LONG},
    ),
    Case(
        "Phi3ForCausalLM",
        "longrope by a factor",
        {"original_max_position_embeddings": 16, "rope_parameters": {**LONG, "factor": 7.0}},
    ),
    Case("Ministral3ForCausalLM", "yarn rope", {"rope_parameters": GROWING, "head_dim": 12}),
    Case("Ministral3ForCausalLM", "sliding window", {"rope_parameters": GROWING, "head_dim": 16, "sliding_window": 6}),
    Case("HunYuanDenseV1ForCausalLM", "grouped heads", {"head_dim": 12}),
    Case("HunYuanDenseV1ForCausalLM", "alpha", {"head_dim": 16, "rope_parameters": ALPHA}),
]
# More experts a token than groups, so that the best group is not the one of the best expert.
GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 4, "topk_group": 2}
GROUPED |= {"routed_scaling_factor": 1.7, "n_shared_experts": 2, "head_dim": 16}
UNGROUPED = {**GROUPED, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0}
# Keys for which the configuration classes have no values that a model can be built of.
REQUIRED: dict[str, dict[str, object]] = {
    "Dots1ForCausalLM": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "Gemma4ForCausalLM": {"hidden_size_per_layer_input": 0},
    "Gemma4ForConditionalGeneration": {"text_config": {"hidden_size_per_layer_input": 0}},
    "NemotronHForCausalLM": {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
}
GATED = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "shared_expert_intermediate_size": 36}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
CASES += [
    Case("Qwen2MoeForCausalLM", "grouped heads", GATED),
    Case("Qwen2MoeForCausalLM", "some dense", {**GATED, "mlp_only_layers": [0], "norm_topk_prob": True}),
    Case("Qwen2MoeForCausalLM", "every second, no biases", {**GATED, "decoder_sparse_step": 2, "qkv_bias": False}),
    Case(
        "Qwen2MoeForCausalLM",
        "sliding window",
        {**GATED, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    Case("OlmoeForCausalLM", "grouped heads", {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 28}),
    Case(
        "OlmoeForCausalLM",
        "biases",
        {**LOCAL, **NO_PADDING, "num_experts": 5, "attention_bias": True, "norm_topk_prob": True},
    ),
    Case(
        "OlmoeForCausalLM",
        "clipped",
        {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 28, "clip_qkv": 0.7},
    ),
    Case("Glm4MoeForCausalLM", "grouped heads", {**GROUPED, "use_qk_norm": True}),
    Case("Glm4MoeForCausalLM", "no groups", {**UNGROUPED, "first_k_dense_replace": 2, "attention_bias": True}),
    Case(
        "Glm4MoeForCausalLM",
        "a quarter rotates",
        {**GROUPED, "rope_parameters": PARTIAL, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    Case("MiniMaxM2ForCausalLM", "grouped heads", {**LOCAL, "head_dim": 16, "rotary_dim": 8}),
    Case("MiniMaxM2ForCausalLM", "a quarter rotates", {**LOCAL, "head_dim": 16, "rope_parameters": PARTIAL}),
    Case(
        "Dots1ForCausalLM",
        "sliding window",
        {**GROUPED, "first_k_dense_replace": 1, "sliding_window": 6, "max_window_layers": 2},
    ),
    Case("Dots1ForCausalLM", "grouped heads", {**UNGROUPED, "norm_topk_prob": True, "attention_bias": True}),
    Case("SolarOpenForCausalLM", "grouped heads", GROUPED),
    Case("SolarOpenForCausalLM", "biases", {**UNGROUPED, "attention_bias": True, "norm_topk_prob": False}),
    Case("ApertusForCausalLM", "grouped heads", {"rope_parameters": LLAMA3}),
    Case(
        "ApertusForCausalLM",
        "biases, tied",
        {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    Case("ApertusForCausalLM", "gelu", {"hidden_act": "gelu", "rope_parameters": LINEAR}),
]
LATENT = {
    **{key: value for key, value in GROUPED.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
SCALED = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
CASES += [
    Case("DeepseekV3ForCausalLM", "grouped heads", {**LATENT, "rope_parameters": SCALED}),
    Case("DeepseekV3ForCausalLM", "no latent of queries", {**LATENT, "q_lora_rank": None, "attention_bias": True}),
    Case("DeepseekV3ForCausalLM", "pairs by halves", {**LATENT, "rope_interleave": False, "tie_word_embeddings": True}),
]
BESIDE = {**WIDER, "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 28}
CASES += [
    Case("Gemma4ForCausalLM", "experts", BESIDE),
    Case(
        "Gemma4ForCausalLM",
        "experts, untied",
        {
            **BESIDE,
            "tie_word_embeddings": False,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "top_k_experts": 3,
        },
    ),
]
SPARSE = ["dense", "sparse", "sparse"]
LITE = {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"}
CASES += [
    Case("Glm4MoeLiteForCausalLM", "grouped heads", {**LITE, "rope_parameters": SCALED, "mlp_layer_types": SPARSE}),
    Case(
        "Glm4MoeLiteForCausalLM",
        "no latent of queries",
        {**LITE, "q_lora_rank": None, "attention_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    Case(
        "Glm4MoeLiteForCausalLM",
        "pairs by halves",
        {**LITE, "rope_interleave": False, "tie_word_embeddings": True, "norm_topk_prob": False},
    ),
]
CLAMPED = {**LOCAL, "head_dim": 16, "sliding_window": 6, "rope_parameters": {**YARN, "truncate": False}}
CASES += [
    # So low a limit that many values exceed it.
    Case("GptOssForCausalLM", "sliding window", {**CLAMPED, "swiglu_limit": 0.9, "swiglu_alpha": 1.4}),
    Case(
        "GptOssForCausalLM",
        "no biases, tied",
        {**CLAMPED, **PATTERN, **NO_PADDING, "attention_bias": False, "tie_word_embeddings": True, "swiglu_limit": 1.1},
    ),
]
CASES += [Case(*variant) for variant in recurrent_variants(EPS, GATED)]
IDS = [f"{case.architecture} {case.label}" for case in CASES]


def make_decoder(
    hf_config: Mapping[str, object], *, backend: str, merge_qkv: bool
) -> tuple[Decoder, Mapping[str, WeightRecipe]]:
    """An uninitialised decoder for a config.json, and its recipes."""
    spec = spec_for(hf_config)
    config = spec.config_from_hf(hf_config)
    request = next(iter(config.attention_requests("cpu", torch.float32).values()))
    attention = resolve_attention(backend if backend in ATTENTION.runnable(request) else "eager", request)
    decoder = spec.build(config, merge_qkv=merge_qkv, kernels=LayerKernels(attention=attention))
    return decoder, spec.recipes(config, merge_qkv=merge_qkv)


def make_twin(
    model: transformers.PreTrainedModel, *, backend: str = "sdpa", merge_qkv: bool = True
) -> tuple[Decoder, Mapping[str, WeightRecipe]]:
    """A decoder with the weights of a transformers model, and its recipes."""
    hf_config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    decoder, recipes = make_decoder(hf_config, backend=backend, merge_qkv=merge_qkv)
    source = spec_for(hf_config).checkpoint_view(
        decoder.config, InMemoryTensors(renamed(model.state_dict(), in_files=True))
    )
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(recipes[name].read(source, 0, parameter.shape[0]))
    return decoder, recipes


def make_rows() -> tuple[Tensor, Tensor]:
    """Token ids and labels of one packed row; the last label of each document and a few others are ignored."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCAB, (sum(LENGTHS),), generator=generator)
    labels = torch.cat([torch.cat((row[1:], torch.tensor([-100]))) for row in ids.split(LENGTHS)])
    labels[5:9] = -100
    return ids, labels


def to_hf(recipes: Mapping[str, WeightRecipe], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Native tensors (weights or gradients) under the names of transformers."""
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        for source, part in recipes[name].split(tensor).items():
            parts.setdefault(source, []).append(part)
    dims = {source: recipe.join_dim for recipe in recipes.values() for source in recipe.sources}
    return {
        source: found[0] if len(found) == 1 else torch.cat(found, dim=dims[source] or 0)
        for source, found in parts.items()
    }


def gradients_of(decoder: Decoder) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in decoder.named_parameters() if parameter.requires_grad}
