"""Folders of tiny models of transformers, with random weights."""

from collections.abc import Mapping
from pathlib import Path

import torch
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
