"""LoRA: small trained matrices beside the frozen weights of any torch module, and of xorl's decoder."""

from xorl.lora.bank import Adam, AdapterBank, StepOutcome
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
from xorl.lora.prequantized import (
    MODELOPT_FILE,
    QUANTIZATION_KEY,
    CheckpointQuantization,
    read_quantization,
    stored_parameters,
    stored_recipes,
    stored_source,
    with_modelopt_file,
)
from xorl.lora.quantized import (
    AdaptiveNoise,
    QuantizedLinear,
    checkpoint_linears,
    dense_parameters,
    gather_rows,
    num_parameters,
    quantizable_linears,
    quantize_linears,
    quantized_linears,
    quantized_rows,
)
from xorl.lora.snapshot import AdapterSnapshot
from xorl.lora.spec import AdapterSpec

__all__ = [
    "MODELOPT_FILE",
    "QUANTIZATION_KEY",
    "Adam",
    "Adapter",
    "AdapterBank",
    "AdapterSnapshot",
    "AdapterSpec",
    "AdaptiveNoise",
    "CheckpointQuantization",
    "QuantizedLinear",
    "StepOutcome",
    "adapter_parameters",
    "adapter_state_dict",
    "adapters",
    "base_parameters",
    "checkpoint_linears",
    "dense_parameters",
    "fold_",
    "gather_rows",
    "init_adapters",
    "inject",
    "load_adapter_state_dict",
    "magnitude",
    "merge_",
    "merged_rows",
    "num_parameters",
    "quantizable_linears",
    "quantize_linears",
    "quantized_linears",
    "quantized_rows",
    "read_quantization",
    "set_magnitude_",
    "stored_parameters",
    "stored_recipes",
    "stored_source",
    "with_modelopt_file",
]
