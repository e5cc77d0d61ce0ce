"""Folders of tiny models of transformers, and of PEFT's adapters on them, with random weights."""

from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tiny_models import hf_config


def save_model(
    folder: Path,
    shape: Mapping[str, object] | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "50GB",
) -> PreTrainedModel:
    """Write the model of such a config.json, by default that of `hf_config()`, and return it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(hf_config() if shape is None else shape)))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def save_peft_adapter(model: PreTrainedModel, folder: Path, **options: object) -> PeftModel:
    """Write an adapter on a model as PEFT does, and return it. It changes what the model computes."""
    adapted = get_peft_model(model, LoraConfig(**options))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder)
    return adapted
