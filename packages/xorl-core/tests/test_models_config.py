"""config.json: what is read, what is refused by name, and that a config written is the config read."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

import xorl.core.models
from xorl.core.models import SPECS, DecoderConfig, spec_for
from xorl.core.nn import RopeConfig

SIZES: dict[str, object] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GPT2_SIZES: dict[str, object] = {"vocab_size": 100, "n_embd": 64, "n_layer": 4, "n_head": 8, "n_positions": 256}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
BANDED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(architecture: str, **changes: object) -> DecoderConfig:
    sizes = GPT2_SIZES if architecture == "GPT2LMHeadModel" else SIZES
    if architecture == "Dots1ForCausalLM":
        sizes = {**sizes, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
    if architecture in ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"):
        sizes = {**sizes, "num_key_value_heads": 8, "head_dim": 64}
    return spec_for({"architectures": [architecture]}).config_from_hf({**sizes, **changes})


@pytest.mark.parametrize("architectures", [None, [], ["BertModel"], "LlamaForCausalLM"])
def test_an_unknown_architecture_lists_the_known_ones(architectures):
    """Catches a KeyError, or a guess by model_type, for a model that is not there."""
    with pytest.raises(ValueError, match=r"ArceeForCausalLM, Cohere2ForCausalLM, .*, Starcoder2ForCausalLM$"):
        spec_for({"architectures": architectures})


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("LlamaForCausalLM", {"vocab_size": None}, "LlamaForCausalLM: the model's config.json has no 'vocab_size'"),
        ("LlamaForCausalLM", {"vocab_size": "100"}, "vocab_size must be of type int, got '100'"),
        ("LlamaForCausalLM", {"vocab_size": True}, "vocab_size must be of type int, got True"),
        ("LlamaForCausalLM", {"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, r"\(8\) must be a multiple of .* heads \(3\)"),
        ("LlamaForCausalLM", {"head_dim": 7}, "even head_dim, got 7"),
        ("LlamaForCausalLM", {"hidden_act": "mish"}, "hidden_act: 'mish' is not supported; supported: silu"),
        ("ArceeForCausalLM", {"hidden_act": "xielu"}, "hidden_act: 'xielu' is not supported; supported: silu"),
        ("ApertusForCausalLM", {"rope_theta": 5e5}, r"replace it by rope_parameters: \{rope_type: default, rope_theta"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "longrope"}}, "rope_scaling: rope_type: 'longrope' is not supp"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "linear"}}, "rope_scaling: .* has no 'factor'"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {**YARN, "mrope_section": [1]}},
            r"mrope_section: \[1\] is not supported",
        ),
        ("LlamaForCausalLM", {"rope_parameters": 3}, "rope_parameters must be a mapping, got 3"),
        ("Qwen3ForCausalLM", {"rope_scaling": BANDED}, "rope_type: 'llama3' is not supported; supported: default"),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"]}, "number of layer_types: 1 is not supported"),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "'sliding_attention' is not supported"),
        ("Qwen2ForCausalLM", {"layer_types": ["linear_attention"] * 4}, "'linear_attention' is not supported"),
        (
            "Qwen2ForCausalLM",
            {"use_mrope": True},
            "use_mrope: True is not supported: multi-dimensional positions are not implemented",
        ),
        (
            "Glm4MoeForCausalLM",
            {"n_group": 3},
            "n_group: 3 and topk_group: 1 do not fit: 128 experts cannot be divided into 3 groups",
        ),
        (
            "Glm4MoeForCausalLM",
            {"n_group": 64, "topk_group": 2},
            "do not fit: 8 active experts, but 2 active groups have 4",
        ),
        (
            "Glm4MoeForCausalLM",
            {"topk_group": 2},
            "n_group: 1 and topk_group: 2 do not fit: 2 active groups, but there",
        ),
        ("Glm4MoeForCausalLM", {"partial_rotary_factor": 0.01}, "0.01 of the .* channels of a head rotates none"),
        ("Glm4MoeForCausalLM", {"n_shared_experts": -1}, "n_shared_experts must be at least 0, got -1"),
        ("Glm4MoeForCausalLM", {"routed_scaling_factor": 0.0}, "routed_scaling_factor must be a number above 0"),
        ("Dots1ForCausalLM", {"n_routed_experts": None}, "config.json has no 'n_routed_experts'"),
        ("OlmoeForCausalLM", {"clip_qkv": -8.0}, "clip_qkv must be a number above 0, got -8.0"),
        ("Qwen2MoeForCausalLM", {"mlp_only_layers": [0, 1, 2, 3]}, "mlp_only_layers and .* make every layer dense"),
        ("MiniMaxM2ForCausalLM", {"router_jitter_noise": 0.1}, "router_jitter_noise is not supported; set it to 0"),
        ("GPT2LMHeadModel", {"n_head": 7}, "n_embd: 64 must be a multiple of n_head: 7"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention: True is not supported"),
        ("GPT2LMHeadModel", {"activation_function": "tanh"}, "activation_function: 'tanh' is not supported"),
        ("Lfm2ForCausalLM", {"intermediate_size": 1}, "a feed-forward block must be at least 1, got 0"),
    ],
)
def test_what_is_not_built_is_refused_by_key_and_value(architecture, changes, message):
    """Catches a config.json that asks for something and silently gets another model."""
    with pytest.raises(ValueError, match=message):
        read(architecture, **changes)


def test_rope_is_read_in_the_old_form_and_the_new():
    """Catches scaling or theta lost because config.json was written by another release."""
    old = read("LlamaForCausalLM", rope_theta=5e5, rope_scaling=BANDED)
    new = read("LlamaForCausalLM", rope_parameters={**BANDED, "rope_theta": 5e5})
    assert old == new
    [rope] = {each.rope for each in old.attentions}
    assert (rope.theta, rope.kind, rope.trained_length) == (5e5, "banded", 64)
    assert read("LlamaForCausalLM", rope_scaling={"type": "default"}) == read("LlamaForCausalLM")


def test_windows_follow_layer_types_or_the_first_windowed_layer():
    """Catches a window on the wrong layers, and one that is switched off in config.json but applied."""
    on = {"use_sliding_window": True, "sliding_window": 16}
    assert read("Qwen3ForCausalLM", sliding_window=16, max_window_layers=2).windows == (None,) * 4
    assert read("Qwen3ForCausalLM", **on, max_window_layers=3).windows == (None, None, None, 16)
    assert read("Qwen3ForCausalLM", **on).windows == (None,) * 4
    layer_types = ["full_attention", "sliding_attention"] * 2
    assert read("Qwen3ForCausalLM", **on, layer_types=layer_types).windows == (None, 16, None, 16)


def test_rotary_parameters_of_a_family_are_read_where_config_json_leaves_them_out():
    """Catches the base and scaling of another family."""
    scaled = RopeConfig(12e6, "banded", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert read("ApertusForCausalLM").attentions[0].rope == scaled
    assert read("ApertusForCausalLM", rope_scaling=BANDED).attentions[0].rope == replace(scaled, trained_length=64)
    assert read("ApertusForCausalLM", rope_parameters={}).attentions[0].rope == RopeConfig(12e6)
    assert read("MixtralForCausalLM").attentions[0].rope == RopeConfig(1e6)


def test_dropout_is_warned_of(caplog):
    """Catches dropout that is silently left out: the one thing that is known, not applied and not refused."""
    with caplog.at_level(logging.WARNING, logger="xorl.core.models.hf_config"):
        read("GPT2LMHeadModel", resid_pdrop=0.1, attn_pdrop=0.0, summary_type="cls_index", eos_token_id=3)
    assert [record.getMessage() for record in caplog.records] == [
        "GPT2LMHeadModel: config.json sets dropout (resid_pdrop: 0.1), which is not applied: models "
        "train without dropout"
    ]


NEUTRAL = {"unset": None, "use_mrope": False, "shared_expert_intermediate_size": 0, "pruned_heads": {}, "prefix": ""}
# What every config.json of an older transformers may contain.
GENERATION = {"do_sample": False, "temperature": 1.0, "top_k": 50, "num_beams": 1, "max_length": 20, "typical_p": 1.0}
# Of released models, as their config.json files have them; without what all families read.
RELEASED: list[tuple[str, dict[str, object]]] = [
    ("LlamaForCausalLM", {"pretraining_tp": 1, "mlp_bias": False, "attention_bias": False, "rope_scaling": None}),
    ("LlamaForCausalLM", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"a": 1}}),
    ("LlamaForCausalLM", {"max_sequence_length": 2048, "_name_or_path": "a", "unsloth_fixed": True}),
    ("LlamaForCausalLM", {"rope_theta": 5e5, "rope_scaling": BANDED, "eos_token_id": [1, 2]}),
    ("LlamaForCausalLM", {"quantization_config": {"quant_method": "fp8"}, "torch_dtype": "bfloat16"}),
    ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": False, "max_window_layers": 3}),
    ("Qwen2ForCausalLM", {"use_mrope": False, "dual_chunk_attention_config": {"chunk_size": 262144}}),
    ("Qwen3ForCausalLM", {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 36}),
    ("Qwen3MoeForCausalLM", {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}),
    ("Qwen2MoeForCausalLM", {"max_window_layers": 21, "shared_expert_intermediate_size": 20480}),
    ("OlmoeForCausalLM", {"clip_qkv": None, "norm_topk_prob": False, "rope_scaling": None}),
    ("Glm4MoeForCausalLM", {"num_nextn_predict_layers": 1, "head_dim": 8, "n_group": 1, "topk_group": 1}),
    (
        "MiniMaxM2ForCausalLM",
        {
            "attn_type_list": [1] * 4,
            "layernorm_full_attention_beta": 1.0,
            "layernorm_linear_attention_beta": 1.0,
            "layernorm_mlp_beta": 1.0,
            "mlp_intermediate_size": 8192,
            "mtp_transformer_layers": 1,
            "num_mtp_modules": 3,
            "qk_norm_type": "per_layer",
            "rotary_dim": 64,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "shared_moe_mode": "sigmoid",
            "use_mtp": True,
            "use_qk_norm": True,
            "use_routing_bias": True,
        },
    ),
    ("MistralForCausalLM", {"sliding_window": None, "rope_theta": 1e6}),
    ("MixtralForCausalLM", {"router_jitter_noise": 0.0, "output_router_logits": False, "router_aux_loss_coef": 0.02}),
    ("Gemma3ForCausalLM", {"cache_implementation": "hybrid", "attn_logit_softcapping": None, "sliding_window": 8}),
    ("Gemma3ForCausalLM", {"rope_local_base_freq": 1e4, "rope_theta": 1e6, "sliding_window_pattern": 6}),
    ("Gemma3ForCausalLM", {"_sliding_window_pattern": 6, "use_bidirectional_attention": False}),
    ("Phi3ForCausalLM", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "pad_token_id": None}),
    ("Phi3ForCausalLM", {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "auto_map": {"a": "b"}, "pad_token_id": None}),
    ("SmolLM3ForCausalLM", {"pretraining_tp": 2, "max_window_layers": 28, "pad_token_id": None}),
    ("Exaone4ForCausalLM", {"sliding_window_pattern": "LLLG", "layer_types": ["full_attention"] * 4}),
    ("Ernie4_5ForCausalLM", {"compression_ratio": 1.0, "use_bias": False}),
    ("ApertusForCausalLM", {"hidden_dropout": 0.0, "mlp_bias": False, "post_norm": False, "qk_norm": True}),
    ("ApertusForCausalLM", {"rope_theta": 12000000, "rope_scaling": {**BANDED, "type": "llama3"}}),
    (
        "Cohere2ForCausalLM",
        {
            "layer_switch": 4,
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": True,
        },
    ),
    (
        "Starcoder2ForCausalLM",
        {
            "activation_function": "gelu",
            "attention_softmax_in_fp32": True,
            "layer_norm_epsilon": 1e-5,
            "mlp_type": "default",
            "norm_type": "layer_norm",
            "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
        },
    ),
    (
        "HunYuanDenseV1ForCausalLM",
        {
            "attention_head_dim": 8,
            "cla_share_factor": 2,
            "dense_list": [64, 0],
            "eod_token_id": 3,
            "im_start_id": 5,
            "mask_init_id": 13,
            "norm_type": "rms",
            "pool_type": "last",
            "use_cla": False,
            "use_qk_norm": True,
            "use_rotary_pos_emb": True,
        },
    ),
    (
        "NemotronHForCausalLM",
        {
            "attention_head_dim": 128,
            "chunk_size": 128,
            "expand": 2,
            "hidden_dropout": 0.0,
            "hybrid_override_pattern": "M-*-",
            "mamba_proj_bias": False,
            "num_hidden_layers": 4,
            "num_logits_to_keep": 1,
            "rescale_prenorm_residual": True,
            "residual_in_fp32": False,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "time_step_floor": 1e-4,
            "time_step_limit": [0.0, float("inf")],
            "time_step_max": 0.1,
            "time_step_rank": 256,
            "use_mamba_kernels": True,
        },
    ),
    ("GPT2LMHeadModel", {"_num_labels": 1, "n_ctx": 256, "summary_use_proj": True, "task_specific_params": {"a": 1}}),
]


@pytest.mark.parametrize(("architecture", "keys"), RELEASED, ids=[name for name, _ in RELEASED])
def test_keys_of_released_models_are_known(architecture, keys):
    """Catches a released model that is refused for a key without effect."""
    read(architecture, **{**NEUTRAL, **GENERATION, **keys})


# Keys without which there is no model.
REQUIRED = {"NemotronHForCausalLM": {"hybrid_override_pattern": "M*-"}}


@pytest.mark.parametrize("architecture", SPECS)
def test_an_unknown_key_is_refused_by_name_and_value(architecture):
    """Catches a model that computes something else than its config.json says, in any family."""
    told = rf"^{architecture}: config.json sets extra: 0.5, mixer: 'a', which .* set it to null there"
    with pytest.raises(ValueError, match=told):
        read(
            architecture,
            extra=0.5,
            mixer="a",
            use_cache=True,
            other_token_id=3,
            pad_token_id=None,
            hidden_size_per_layer_input=0,
            **REQUIRED.get(architecture, {}),
        )


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("LlamaForCausalLM", {"attention_multiplier": 2.0}),
        ("LlamaForCausalLM", {"rope_interleaved": True}),
        ("Qwen3MoeForCausalLM", {"use_qk_norm": False}),
        ("Qwen3MoeForCausalLM", {"qkv_bias": True}),
        ("MiniMaxM2ForCausalLM", {"scoring_func": "softmax"}),
        ("MiniMaxM2ForCausalLM", {"qk_norm_type": "per_head"}),
        ("Cohere2ForCausalLM", {"rotary_pct": 0.5}),
        ("Cohere2ForCausalLM", {"use_parallel_block": False}),
        ("Starcoder2ForCausalLM", {"norm_type": "rms_norm"}),
        ("ApertusForCausalLM", {"qk_norm": False}),
        ("ApertusForCausalLM", {"post_norm": True}),
        ("HunYuanDenseV1ForCausalLM", {"use_cla": True}),
        ("HunYuanDenseV1ForCausalLM", {"use_rotary_pos_emb": False}),
        ("Phi3ForCausalLM", {"interpolate_factor": 2, "pad_token_id": None}),
    ],
)
def test_a_key_that_is_harmless_with_another_value_is_refused(architecture, keys):
    """Catches a list of harmless keys that ignores their values."""
    key, value = next(iter(keys.items()))
    with pytest.raises(ValueError, match=f"sets {key}: {value!r}, which may change"):
        read(architecture, **keys)


def test_a_family_is_named_only_in_its_own_file():
    """Catches a branch on a family outside its file, where the next family would have to be added too."""
    folder = Path(xorl.core.models.__file__).parent
    families = {spec.model_type for spec in SPECS.values()}
    sources = [path for package in (folder, folder.parent / "nn") for path in package.glob("*.py")]
    for path in sources:
        if path == folder / "__init__.py":
            continue
        for family in (each for each in families if each not in path.stem and path.stem not in each):
            # Keys of a config.json may be named for the release of another family that they came from.
            named = re.search(rf"{family}(?!_?\d)", path.read_text(), re.IGNORECASE)
            assert not named, f"{path} names {family}"


def test_heads_of_layers_are_read_in_both_forms():
    """Catches heads that are right only in the config.json of one release."""
    sizes = {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 0,
    }
    sizes |= {"head_dim": 8, "attention_k_eq_v": True}
    released = read("Gemma4ForCausalLM", **sizes, global_head_dim=16, num_global_key_value_heads=1)
    entry = {"head_dim": 16, "num_key_value_heads": 1}
    saved = read("Gemma4ForCausalLM", **sizes, per_layer_config={"01": entry, "3": entry})
    assert released == saved
    assert [each.head_dim for each in saved.attentions] == [8, 16, 8, 16]
    with pytest.raises(ValueError, match=r"per_layer_config must be by numbers of layers, 0 to 3, got 7"):
        read("Gemma4ForCausalLM", **sizes, per_layer_config={"7": entry})
    with pytest.raises(ValueError, match=r"per_layer_config: 3: width: 3 is not supported"):
        read("Gemma4ForCausalLM", **sizes, per_layer_config={"3": {"width": 3}})
