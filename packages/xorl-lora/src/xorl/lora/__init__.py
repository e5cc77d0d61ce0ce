"""LoRA: small trained matrices beside the frozen weights of any torch module."""

from xorl.lora.inject import adapter_parameters, adapter_state_dict, inject, load_adapter_state_dict
from xorl.lora.linear import LoRALinear
from xorl.lora.merge import merge_
from xorl.lora.spec import AdapterSpec

__all__ = [
    "AdapterSpec",
    "LoRALinear",
    "adapter_parameters",
    "adapter_state_dict",
    "inject",
    "load_adapter_state_dict",
    "merge_",
]
