"""The tiny models of the tests: what config.json says of one. Without torch and xorl, so that any test can have it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
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
_EXPERTS: dict[str, dict[str, object]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
