"""Maps the service's options to those of local training: the workers build what `xorl train` would build.

This file defines which option corresponds to which, and which defaults depend on others.
"""

import re

from xorl.config.entries import DatasetEntryConfig
from xorl.config.local import Config, DataConfig, LoraConfig, ModelConfig, TrainConfig
from xorl.config.resolve import resolve
from xorl.config.server import MUON_REFERENCE_LR, ServerConfig

# Options whose name in local training differs.
RENAMED = {"qlora_exclude_modules": "lora.exclude_modules"}
# Options of the same name with a different meaning.
OWN = {"load_checkpoint_path"}
# Options whose value the workers need as given.
SAID_AGAIN = {"load_weights_mode"}
SECTIONS = {"model": ModelConfig, "train": TrainConfig, "lora": LoraConfig, "data": DataConfig}


def local_path(option: str) -> str | None:
    """Returns the path of the corresponding option of local training, or None."""
    if option in RENAMED or option in OWN:
        return RENAMED.get(option)
    return next((f"{name}.{option}" for name, section in SECTIONS.items() if option in section.model_fields), None)


# From the path of an option of local training to the service's name for it.
NAMES: dict[str, str] = {path: option for option in ServerConfig.model_fields if (path := local_path(option))}


def in_server_terms(text: str) -> str:
    """Returns a message about options of local training with the service's names in it."""
    return re.sub(r"\b(?:model|data|train|lora)\.\w+", lambda match: NAMES.get(match[0], match[0]), text)


def training_config(config: ServerConfig) -> Config:
    """Returns the configuration with which local training builds the same model and optimizer.

    It has no data and no schedule: a client provides both.
    """
    return resolve(projected(config))[0]


def projected(config: ServerConfig) -> Config:
    """Returns the same without the defaults that depend on others."""
    values: dict[str, dict[str, object]] = {name: {} for name in SECTIONS}
    for path, option in NAMES.items():
        section, name = path.split(".")
        values[section][name] = getattr(config, option)
    if config.load_weights_mode == "dcp":
        # For code that reads model_path; the checkpoint is loaded on top of it.
        values["train"]["load_weights_mode"] = "broadcast"
    return Config(
        model=ModelConfig.model_validate(values["model"]),
        data=DataConfig.model_validate(values["data"] | {"datasets": [DatasetEntryConfig(path="dummy")]}),
        # The client sends learning rate and clipping with each step.
        train=TrainConfig.model_validate(
            values["train"] | {"lr": MUON_REFERENCE_LR, "max_grad_norm": None, "use_wandb": False}
        ),
        lora=LoraConfig.model_validate(values["lora"]),
    )


def resolve_server(config: ServerConfig) -> tuple[ServerConfig, dict[str, str]]:
    """Returns the configuration with these defaults filled in, and the reason for each of them."""
    local, told = resolve(projected(config))
    values: dict[str, object] = {}
    reasons: dict[str, str] = {}
    for path, option in NAMES.items():
        section, name = path.split(".")
        value = getattr(getattr(local, section), name)
        if option not in SAID_AGAIN and value != getattr(config, option):
            values[option] = value
            reasons[option] = in_server_terms(told.get(path, ""))

    def follow(option: str, value: object, reason: str) -> None:
        values[option] = value
        reasons[option] = reason

    if config.model_name is None:
        named = "model_path" if config.model_path is not None else "config_path"
        follow("model_name", getattr(config, named), f"default, {named}")
    if config.max_lora_rank is None and (config.enable_lora or config.enable_qlora):
        follow("max_lora_rank", config.lora_rank, "default, lora_rank")
    if config.load_checkpoint_path == "":
        follow("load_checkpoint_path", None, "")
    return config.model_copy(update=values), {option: reason for option, reason in reasons.items() if reason}
