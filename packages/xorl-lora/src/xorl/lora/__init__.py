"""LoRA: small trained matrices beside the frozen weights of any torch module, and of xorl's decoder."""

from xorl.lora.bank import Adam, AdapterBank
from xorl.lora.inject import (
    Adapter,
    adapter_parameters,
    adapter_state_dict,
    adapters,
    init_adapters,
    inject,
    load_adapter_state_dict,
)
from xorl.lora.merge import merge_
from xorl.lora.spec import AdapterSpec

__all__ = [
    "Adam",
    "Adapter",
    "AdapterBank",
    "AdapterSpec",
    "adapter_parameters",
    "adapter_state_dict",
    "adapters",
    "init_adapters",
    "inject",
    "load_adapter_state_dict",
    "merge_",
]
