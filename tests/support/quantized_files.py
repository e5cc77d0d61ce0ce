"""Weights of checkpoints that other tools have quantised: fp8 in blocks, ModelOpt's NVFP4, bitsandbytes' nf4."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from xorl.kernels.quant import QuantScheme
from xorl.kernels.quant.block_fp8 import quantize_block_fp8
from xorl.kernels.quant.nf4 import quantize_nf4
from xorl.kernels.quant.nvfp4 import nvfp4_global_scale, quantize_nvfp4

NESTED_BLOCK = 32


def quantization_config(scheme: QuantScheme, skipped: list[str] | None = None) -> dict[str, object]:
    """The entry `quantization_config` of a config.json; `skipped` are the modules that are not quantised."""
    size, skipped = scheme.group_size, skipped or []
    match scheme.quant_format:
        case "block_fp8":
            stored = {"quant_method": "fp8", "weight_block_size": [size, size]}
            return {**stored, "modules_to_not_convert": skipped}
        case "nvfp4":
            return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": skipped}
        case _:
            stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
            return {**stored, "llm_int8_skip_modules": skipped}


def stored_tensors(module: str, weight: Tensor, scheme: QuantScheme, *, nested: bool = False) -> dict[str, Tensor]:
    """The tensors that hold a weight [O, I], by name. nested: nf4 whose scales are quantised, too."""
    size, name = scheme.group_size, f"{module}.weight"
    match scheme.quant_format:
        case "block_fp8":
            codes, scales = quantize_block_fp8(weight, size)
            return {name: codes, f"{name}_scale_inv": scales}
        case "nvfp4":
            scale = nvfp4_global_scale(weight.abs().amax())
            codes, scales = quantize_nvfp4(weight, scale.expand(len(weight)).contiguous(), size)
            extra = {f"{name}_scale_2": scale, f"{module}.input_scale": torch.tensor(0.5)}
            return {name: codes, f"{name}_scale": scales, **extra}
        case _:
            return _nf4(name, weight, nested)


def nested_scales(absmax: Tensor) -> Tensor:
    """Scales near `absmax` that are exact after they are quantised, so that they can be compared to the bit."""
    steps = (absmax * 2048).round().clamp(1, 255)
    return torch.where(_halved(absmax), steps.clamp(max=128), steps) / 2048


def _halved(absmax: Tensor) -> Tensor:
    """Whether a scale is in a block whose largest value is half of that of the others."""
    return (torch.arange(absmax.numel()) // NESTED_BLOCK % 3 == 1).view(absmax.shape)


def _nf4(name: str, weight: Tensor, nested: bool) -> dict[str, Tensor]:
    codes, absmax = quantize_nf4(weight, 64)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    made = {name: codes.reshape(-1, 1), f"{name}.quant_map": torch.zeros(16)}
    if nested:
        halved = _halved(absmax)
        made[f"{name}.absmax"] = ((nested_scales(absmax) * 2048 - 1) * (1 + halved.int())).flatten().to(torch.uint8)
        made[f"{name}.nested_quant_map"] = torch.arange(256) / 1024
        made[f"{name}.nested_absmax"] = 0.5 / (1 + halved.flatten()[::NESTED_BLOCK].int())
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_offset": 1 / 2048}
    else:
        made[f"{name}.absmax"] = absmax.flatten()
    packed = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return made | {f"{name}.quant_state.bitsandbytes__nf4": packed}
