"""Configuration: the options of xorl, and how a file and overrides become a checked, immutable tree of them.

Nothing here imports torch, so that mistakes are reported at once.
"""

from xorl.config.conflicts import check_world_size
from xorl.config.entries import DatasetEntryConfig, SweepMemberConfig
from xorl.config.load import (
    LoadedConfig,
    LoadedServerConfig,
    config_from_mapping,
    load_config,
    load_server_config,
    server_config_from_mapping,
)
from xorl.config.local import Config, DataConfig, LoraConfig, ModelConfig, TrainConfig
from xorl.config.problems import ConfigError, Origin, Problem
from xorl.config.server import InferenceEndpointConfig, ServerConfig, num_workers
from xorl.config.server_training import training_config
from xorl.config.sweep import member_config

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "DatasetEntryConfig",
    "InferenceEndpointConfig",
    "LoadedConfig",
    "LoadedServerConfig",
    "LoraConfig",
    "ModelConfig",
    "Origin",
    "Problem",
    "ServerConfig",
    "SweepMemberConfig",
    "TrainConfig",
    "check_world_size",
    "config_from_mapping",
    "load_config",
    "load_server_config",
    "member_config",
    "num_workers",
    "server_config_from_mapping",
    "training_config",
]
