"""Configuration: the options of xorl, and how a file and overrides become a checked, immutable tree of them.

Nothing here imports torch, so that a mistake is reported at once.
"""

from xorl.config.conflicts import check_world_size
from xorl.config.load import LoadedConfig, config_from_mapping, load_config
from xorl.config.local import Config, DataConfig, DatasetEntryConfig, LoraConfig, ModelConfig, TrainConfig
from xorl.config.problems import ConfigError, Origin, Problem

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "DatasetEntryConfig",
    "LoadedConfig",
    "LoraConfig",
    "ModelConfig",
    "Origin",
    "Problem",
    "TrainConfig",
    "check_world_size",
    "config_from_mapping",
    "load_config",
]
