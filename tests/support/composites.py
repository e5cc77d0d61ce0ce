"""Tiny composite models of transformers, with random weights, and their folders in either spelling of names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB = 83
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_GEMMA = {"model_type": "gemma3_text", "sliding_window": 6, "layer_types": _LAYERS, "query_pre_attn_scalar": 20}
_GEMMA_IMAGES = {"mm_tokens_per_image": 4, "image_token_index": 80, "boi_token_index": 81, "eoi_token_index": 82}
_DELTA = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e3,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}
_QWEN_IMAGES = {"image_token_id": 80, "video_token_id": 81, "vision_config": _QWEN_VISION}
_EXPERTS = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 36,
}
# Label: (class, the rest of text_config, the rest of config.json).
COMPOSITES: Mapping[str, tuple[str, Mapping[str, object], Mapping[str, object]]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", _GEMMA, _GEMMA_IMAGES),
    # The text model's own entry, which says that they are tied, does not count.
    "gemma3 untied": (
        "Gemma3ForConditionalGeneration",
        {**_GEMMA, "tie_word_embeddings": True},
        {**_GEMMA_IMAGES, "tie_word_embeddings": False},
    ),
    "ministral3": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "ministral3", "rope_parameters": _YARN},
        {"image_token_index": 80, "tie_word_embeddings": False},
    ),
    # Here the text model's entry says that they are not tied.
    "mistral": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False},
        {"image_token_index": 80, "tie_word_embeddings": True},
    ),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", _DELTA, _QWEN_IMAGES),
}
# Their experts have other names in transformers' memory than in files.
MIXTURES: Mapping[str, tuple[str, Mapping[str, object], Mapping[str, object]]] = {
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", {**_DELTA, **_EXPERTS}, _QWEN_IMAGES)
}


def make_composite(label: str) -> transformers.PreTrainedModel:
    """A model in fp32; its norms and biases are neither 0 nor 1."""
    name, text, rest = {**COMPOSITES, **MIXTURES}[label]
    model_class = getattr(transformers, name)
    config = model_class.config_class(**{"vision_config": _VISION, **rest}, text_config={**_TEXT, **text})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.15 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def write_composite(label: str, folder: Path, *, renamed: bool = False) -> Path:
    """The folder of a model; `renamed`: with the names that its modules have in transformers now."""
    make_composite(label).save_pretrained(folder, max_shard_size="60KB")
    if renamed:
        save_folder(folder, {_renamed(name): tensor for name, tensor in read_folder(folder).items()})
    return folder


def save_folder(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace the tensors of a folder."""
    for file in folder.glob("model*"):
        file.unlink()
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})


def _renamed(name: str) -> str:
    if name.startswith("language_model.lm_head"):
        return name.removeprefix("language_model.")
    if name.startswith("language_model.model."):
        return "model.language_model." + name.removeprefix("language_model.model.")
    if name.startswith("model.") or name == "lm_head.weight":
        return name  # as it is in this family's files
    return f"model.{name}"


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    files = sorted(folder.glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def read_json(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())
