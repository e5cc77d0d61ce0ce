"""PEFT's adapter format: the content of its files, and a base model with an adapter merged in."""

from xorl.lora.peft.config import CONFIG_FILE, AdapterConfig, shared_value, shortest_names
from xorl.lora.peft.layout import (
    PREFIX,
    WEIGHTS_FILE,
    AdaptedModule,
    AdapterLayout,
    HeldTensors,
    ReplacedTensors,
    differences,
    keys_of,
    read_layout,
)
from xorl.lora.peft.merged import AdapterValues, MergedWeights, fold
from xorl.lora.peft.model import FileTensor, adapter_tensors, config_of, load_adapters

__all__ = [
    "CONFIG_FILE",
    "PREFIX",
    "WEIGHTS_FILE",
    "AdaptedModule",
    "AdapterConfig",
    "AdapterLayout",
    "AdapterValues",
    "FileTensor",
    "HeldTensors",
    "MergedWeights",
    "ReplacedTensors",
    "adapter_tensors",
    "config_of",
    "differences",
    "fold",
    "keys_of",
    "load_adapters",
    "read_layout",
    "shared_value",
    "shortest_names",
]
