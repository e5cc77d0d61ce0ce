"""LoRA for any torch module and for xorl's decoder: trains small matrices beside the frozen weights."""

from importlib.metadata import version

from xorl.lora.adam import Adam
from xorl.lora.bank import AdapterBank
from xorl.lora.inject import (
    Adapter,
    adapter_parameters,
    adapter_state_dict,
    adapters,
    adapters_off,
    init_adapters,
    inject,
    load_adapter_state_dict,
)
from xorl.lora.merge import merge_
from xorl.lora.quantize import quantize_
from xorl.lora.spec import AdapterSpec

__all__ = [
    "Adam",
    "Adapter",
    "AdapterBank",
    "AdapterSpec",
    "__version__",
    "adapter_parameters",
    "adapter_state_dict",
    "adapters",
    "adapters_off",
    "init_adapters",
    "inject",
    "load_adapter_state_dict",
    "merge_",
    "quantize_",
]

__version__ = version("xorl-lora")
