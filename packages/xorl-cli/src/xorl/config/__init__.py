"""The options of xorl, and the loading of a file and overrides into a validated, immutable configuration.

This package does not import torch, so that mistakes are reported immediately.
"""

from xorl.config.load import (
    LoadedConfig,
    LoadedServerConfig,
    config_from_mapping,
    load_config,
    load_server_config,
    server_config_from_mapping,
)
from xorl.config.local import Config
from xorl.config.problems import ConfigError, Problem
from xorl.config.server import ServerConfig

__all__ = [
    "Config",
    "ConfigError",
    "LoadedConfig",
    "LoadedServerConfig",
    "Problem",
    "ServerConfig",
    "config_from_mapping",
    "load_config",
    "load_server_config",
    "server_config_from_mapping",
]
