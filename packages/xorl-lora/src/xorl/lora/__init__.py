"""LoRA: small trained matrices beside the frozen weights of any torch module, and of xorl's decoder."""

from xorl.lora.inject import (
    Adapter,
    adapter_parameters,
    adapter_state_dict,
    adapters,
    base_parameters,
    init_adapters,
    inject,
    load_adapter_state_dict,
)
from xorl.lora.merge import fold_, magnitude, merge_, merged_rows, set_magnitude_
from xorl.lora.spec import AdapterSpec

__all__ = [
    "Adapter",
    "AdapterSpec",
    "adapter_parameters",
    "adapter_state_dict",
    "adapters",
    "base_parameters",
    "fold_",
    "init_adapters",
    "inject",
    "load_adapter_state_dict",
    "magnitude",
    "merge_",
    "merged_rows",
    "set_magnitude_",
]
