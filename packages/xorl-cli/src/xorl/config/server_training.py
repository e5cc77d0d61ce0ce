"""Maps the service's options to those of local training, so that workers build what `xorl train` would build.

This file defines the correspondence between options, and the defaults that depend on other options.
"""

import re

from xorl.config.data import DataConfig
from xorl.config.entries import DatasetEntryConfig
from xorl.config.local import Config, LoraConfig, ModelConfig, TrainConfig
from xorl.config.resolve import resolve
from xorl.config.server import MUON_REFERENCE_LR, ServerConfig

# Options with a different name in local training.
RENAMED = {"qlora_exclude_modules": "lora.exclude_modules"}
# Options with the same name but a different meaning in local training.
SERVER_ONLY = {"load_checkpoint_path"}
# Options that are not replaced by their resolved value, because the workers need the original one.
KEPT_AS_GIVEN = {"load_weights_mode"}
SECTIONS = {"model": ModelConfig, "train": TrainConfig, "lora": LoraConfig, "data": DataConfig}


def local_path(option: str) -> str | None:
    """Returns the path of the corresponding option of local training, or None."""
    if option in RENAMED or option in SERVER_ONLY:
        return RENAMED.get(option)
    return next((f"{name}.{option}" for name, section in SECTIONS.items() if option in section.model_fields), None)


# Maps the paths of local options to the service's names.
SERVER_NAMES: dict[str, str] = {path: option for option in ServerConfig.model_fields if (path := local_path(option))}


def in_server_terms(text: str) -> str:
    """Replaces the paths of local options in a message by the service's names."""
    return re.sub(r"\b(?:model|data|train|lora)\.\w+", lambda match: SERVER_NAMES.get(match[0], match[0]), text)


def training_config(config: ServerConfig) -> Config:
    """Returns the local configuration that builds the same model and optimizer.

    It has neither data nor a schedule, because clients provide both.
    """
    return resolve(unresolved_local_config(config))[0]


def unresolved_local_config(config: ServerConfig) -> Config:
    """Returns `training_config` without the defaults that depend on other options."""
    values: dict[str, dict[str, object]] = {name: {} for name in SECTIONS}
    for path, option in SERVER_NAMES.items():
        section, name = path.split(".")
        value = getattr(config, option)
        # An option that is not set explicitly must not take precedence over one that is.
        if option in config.model_fields_set or value != SECTIONS[section].model_fields[name].default:
            values[section][name] = value
    if config.load_weights_mode == "dcp":
        # The checkpoint is loaded separately; model_path does not name one.
        values["train"]["load_weights_mode"] = "broadcast"
    return Config(
        model=ModelConfig.model_validate(values["model"]),
        data=DataConfig.model_validate(values["data"] | {"datasets": [DatasetEntryConfig(path="dummy")]}),
        # Clients send the learning rate and the clipping norm with each step, and the gradient is that of their loss:
        # a balancing loss that config.json sets is not added to it.
        train=TrainConfig.model_validate(
            values["train"]
            | {"lr": MUON_REFERENCE_LR, "max_grad_norm": None, "use_wandb": False, "router_aux_loss_coef": 0.0}
        ),
        lora=LoraConfig.model_validate(values["lora"]),
    )


def resolve_server(config: ServerConfig) -> tuple[ServerConfig, dict[str, str]]:
    """Returns the configuration with defaults that depend on other options filled in, and the reason for each."""
    local, local_reasons = resolve(unresolved_local_config(config))
    values: dict[str, object] = {}
    reasons: dict[str, str] = {}
    for path, option in SERVER_NAMES.items():
        section, name = path.split(".")
        value = getattr(getattr(local, section), name)
        if option not in KEPT_AS_GIVEN and value != getattr(config, option):
            values[option] = value
            reasons[option] = in_server_terms(local_reasons.get(path, ""))

    def set_default(option: str, value: object, reason: str) -> None:
        values[option] = value
        reasons[option] = reason

    if config.model_name is None:
        named = "model_path" if config.model_path is not None else "config_path"
        set_default("model_name", getattr(config, named), f"default, {named}")
    if config.max_lora_rank is None and config.has_adapters:
        set_default("max_lora_rank", config.lora_rank, "default, lora_rank")
    if config.load_checkpoint_path == "":
        set_default("load_checkpoint_path", None, "")
    return config.model_copy(update=values), {option: reason for option, reason in reasons.items() if reason}
