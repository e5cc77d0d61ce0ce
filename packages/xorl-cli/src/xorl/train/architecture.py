"""What is known of a model before any weight: its family and shape, as config.json has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xorl.ckpt import CheckpointError, CheckpointFailure, WeightRecipe, is_complete, resolve_folder
from xorl.core.models import DecoderConfig, ModelSpec, spec_for
from xorl.lora import MODELOPT_FILE, with_modelopt_file

# A model's folder without its weights.
CONFIG_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True)
class Architecture:
    """What is known of a model before any weight: its family, its shape and the Hugging Face configuration.

    `chat_template` is what it is trained with where that is not its tokenizer's own.
    """

    spec: ModelSpec
    config: DecoderConfig
    hf_config: Mapping[str, object]
    tokenizer_folder: Path | None
    chat_template: str | None = None

    def recipes(self, *, merge_qkv: bool) -> Mapping[str, WeightRecipe]:
        """How the parameters are named and laid out in Hugging Face's files."""
        return self.spec.recipes(self.config, merge_qkv=merge_qkv)


def architecture_at(option: str, path: str) -> Architecture:
    """That of the model whose folder or Hub id `option` gives. Raises ValueError for a model that is not known."""
    folder = folder_of(option, path, CONFIG_PATTERNS)
    return read_config(option, folder / "config.json", folder)


def read_config(option: str, file: Path, tokenizer_folder: Path) -> Architecture:
    """That of a config.json, and of what another tool wrote beside it of its quantisation."""
    if not file.is_file():
        hint = ""
        if option == "model.model_path" and is_complete(file.parent):
            hint = "; it is a checkpoint of xorl, whose weights train.load_weights_mode: dcp starts from"
        raise ValueError(f"{option}: {file.parent} holds no config.json{hint}")
    try:
        hf_config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{option}: {file}:{error.lineno} is not JSON: {error.msg}") from error
    beside = file.parent / MODELOPT_FILE
    if beside.is_file():
        try:
            hf_config = with_modelopt_file(hf_config, json.loads(beside.read_text()))
        except ValueError as error:
            raise ValueError(f"{option}: {beside}: {error}") from error
    try:
        spec = spec_for(hf_config)
        config = spec.config_from_hf(hf_config)
    except ValueError as error:
        raise ValueError(f"{option}: {file}: {error}") from error
    return Architecture(spec, config, hf_config, tokenizer_folder)


def folder_of(option: str, path: str, patterns: Sequence[str] | None = None) -> Path:
    """What `option` names, from here or from the Hub; where that fails, the message begins with the option."""
    try:
        return resolve_folder(path) if patterns is None else resolve_folder(path, patterns=patterns)
    except (CheckpointError, CheckpointFailure) as error:
        raise type(error)(f"{option}: {error}") from error
