"""From the options of QLoRA to quantised base weights in a model, and their values into them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xorl.ckpt import RowTarget, WeightRecipe, WeightSource
from xorl.config import LoraConfig
from xorl.core.models import Decoder
from xorl.kernels.quant import QuantScheme, quant_refusal
from xorl.lora import (
    base_parameters,
    quantizable_linears,
    quantize_linears,
    quantized_linears,
    quantized_rows,
    read_quantization,
    stored_parameters,
    stored_recipes,
    stored_source,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Quantization:
    """How base weights are kept, which are not, and whether the checkpoint has them so already.

    `exclude` are names and patterns; those that come from a checkpoint's config may name what a model has not.
    """

    scheme: QuantScheme
    exclude: tuple[str, ...]
    is_stored: bool
    is_explicit: bool


def read_options(lora: LoraConfig, hf_config: Mapping[str, object]) -> Quantization | None:
    """What `lora` asks for, or None where base weights are not quantised.

    Raises ValueError that names the option for what this checkpoint cannot be used with.
    """
    try:
        stored = read_quantization(hf_config)
    except ValueError as error:
        raise ValueError(f"model.model_path: the model's config.json has {error}") from error
    if not lora.enable_qlora:
        if stored is not None:
            raise ValueError(
                f"model.model_path: the weights are quantised ({_described(stored.scheme)}); train adapters over them "
                f"with lora.enable_qlora: true and lora.quant_format: {stored.scheme.quant_format}, or start from the "
                "model that was quantised"
            )
        return None
    assert lora.quant_group_size is not None, "resolved by the configuration"
    scheme = QuantScheme(lora.quant_format, lora.quant_group_size)
    if (refusal := scheme.group_refusal()) is not None:
        raise ValueError(f"lora.quant_group_size: {refusal}")
    if stored is None:
        return Quantization(scheme, tuple(lora.exclude_modules or ()), is_stored=False, is_explicit=True)
    if scheme.quant_format != stored.scheme.quant_format:
        raise ValueError(
            f"lora.quant_format: {scheme.quant_format}, and the checkpoint is quantised ({_described(stored.scheme)}): "
            f"set it to {stored.scheme.quant_format}, or start from the model that was quantised"
        )
    if scheme != stored.scheme:
        raise ValueError(
            f"lora.quant_group_size: {scheme.group_size}, and the checkpoint is quantised "
            f"({_described(stored.scheme)}): set it to {stored.scheme.group_size}"
        )
    if lora.exclude_modules is not None:
        raise ValueError(
            "lora.exclude_modules: the checkpoint is quantised already, and its config names the modules that are not: "
            "leave it out"
        )
    return Quantization(scheme, stored.exclude, is_stored=True, is_explicit=False)


def require_device(quantization: Quantization, device: torch.device) -> None:
    """Raise ValueError that names the option where `device` cannot compute with such weights."""
    quant_format = quantization.scheme.quant_format
    if (refusal := quant_refusal(quant_format, device)) is not None:
        raise ValueError(f"lora.quant_format: {quant_format} cannot run here: {refusal}")


def _described(scheme: QuantScheme) -> str:
    return f"{scheme.quant_format} in groups of {scheme.group_size}"


def quantize_base(module: Decoder, quantization: Quantization) -> None:
    """Let the linear layers of a model without memory keep their frozen weights quantised, in place."""
    named = quantizable_linears(
        module, quantization.exclude, "lora.exclude_modules", ignore_unknown=not quantization.is_explicit
    )
    paths = [path for path in named if not module.get_parameter(f"{path}.weight").requires_grad]
    if not paths:
        raise ValueError("lora.exclude_modules: no linear layer is left to quantise; use enable_lora without qlora")
    quantize_linears(module, paths, quantization.scheme, "lora.quant_group_size")


def base_targets(
    module: Decoder,
    recipes: Mapping[str, WeightRecipe],
    source: WeightSource,
    quantization: Quantization | None,
) -> tuple[dict[str, Tensor | RowTarget], Mapping[str, WeightRecipe], WeightSource]:
    """What takes a checkpoint's weights, how they are made, and of what: parameters, or what quantises their rows."""
    parameters: dict[str, Tensor | RowTarget] = dict(base_parameters(module))
    if quantization is None:
        return parameters, recipes, source
    if quantization.is_stored:
        try:
            stored = stored_recipes(module, recipes)
        except ValueError as error:
            raise ValueError(f"model.model_path: {error}") from error
        return parameters, stored, stored_source(module, recipes, source)
    for name in stored_parameters(module):
        parameters.pop(name)
    return parameters | quantized_rows(module), recipes, source


def scheme_of(module: nn.Module) -> QuantScheme | None:
    """How the base weights of a model are kept quantised, if they are."""
    return next((layer.scheme for layer in quantized_linears(module).values()), None)


def log_quantized(module: Decoder) -> None:
    """Say how much memory the base takes, over all ranks."""
    layers = quantized_linears(module)
    if not layers:
        return
    stored = stored_parameters(module).values()
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in stored)
    num_weights = sum(layer.out_features * layer.in_features for layer in layers.values())
    base = sum(parameter.numel() * parameter.element_size() for parameter in base_parameters(module).values())
    logger.info(
        "quantized layers=%d format=%s bytes_per_weight=%.4f base_gib=%.3f",
        len(layers),
        _described(next(iter(layers.values())).scheme).replace(" ", "_"),
        num_bytes / num_weights,
        base / 2**30,
    )
