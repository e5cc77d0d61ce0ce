"""PEFT's adapter format: whole folders, the content of their files, and merging it into a base checkpoint."""

from xorl.lora.peft.config import CONFIG_FILE, AdapterConfig
from xorl.lora.peft.converted import in_form
from xorl.lora.peft.fit import differences
from xorl.lora.peft.folder import load_adapter, save_adapter
from xorl.lora.peft.layout import WEIGHTS_FILE, InMemoryTensors, read_layout
from xorl.lora.peft.merged import MergedWeights
from xorl.lora.peft.model import adapter_tensors, config_of, load_adapters
from xorl.lora.peft.views import per_expert

__all__ = [
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "AdapterConfig",
    "InMemoryTensors",
    "MergedWeights",
    "adapter_tensors",
    "config_of",
    "differences",
    "in_form",
    "load_adapter",
    "load_adapters",
    "per_expert",
    "read_layout",
    "save_adapter",
]
