"""Quantises the base weights of a model according to the QLoRA options."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xorl.ckpt import Piece, WeightRecipe, WeightSource
from xorl.ckpt.load import RowTarget
from xorl.config.local import LoraConfig
from xorl.core.models import Decoder
from xorl.core.nn.parts import parameter_parts
from xorl.kernels.quant import QuantScheme, quant_refusal
from xorl.lora.inject import base_parameters
from xorl.lora.prequantized import read_quantization, stored_parameters, stored_recipes, stored_source
from xorl.lora.quantized import quantizable_linears, quantize_linears, quantized_linears, quantized_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Quantization:
    """How base weights are quantised, and which are not.

    Attributes:
        exclude: names and patterns of the layers that are not quantised.
        is_stored: the checkpoint's weights are quantised already.
        is_explicit: `exclude` is the user's; otherwise it is from the checkpoint's config and may name unknown layers.
    """

    scheme: QuantScheme
    exclude: tuple[str, ...]
    is_stored: bool
    is_explicit: bool


def read_options(lora: LoraConfig, hf_config: Mapping[str, object]) -> Quantization | None:
    """The quantisation that `lora` selects; None if base weights are not quantised.

    Raises ValueError for options that do not suit the weights described by `hf_config`.
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
                "original model"
            )
        return None
    assert lora.quant_group_size is not None, "resolved by the configuration"
    scheme = QuantScheme(lora.quant_format, lora.quant_group_size)
    if stored is None:
        return Quantization(scheme, tuple(lora.exclude_modules or ()), is_stored=False, is_explicit=True)
    if scheme.quant_format != stored.scheme.quant_format:
        raise ValueError(
            f"lora.quant_format: {scheme.quant_format}, but the checkpoint is quantised ({_described(stored.scheme)}): "
            f"set it to {stored.scheme.quant_format}, or start from the original model"
        )
    if scheme != stored.scheme:
        raise ValueError(
            f"lora.quant_group_size: {scheme.group_size}, but the checkpoint is quantised "
            f"({_described(stored.scheme)}): set it to {stored.scheme.group_size}"
        )
    if lora.exclude_modules is not None:
        raise ValueError(
            "lora.exclude_modules: the checkpoint is quantised already, and its config lists the excluded modules; "
            "leave the option out"
        )
    return Quantization(scheme, stored.exclude, is_stored=True, is_explicit=False)


def require_device(quantization: Quantization, device: torch.device) -> None:
    """Raise ValueError if `device` cannot compute with such weights."""
    quant_format = quantization.scheme.quant_format
    if (refusal := quant_refusal(quant_format, device)) is not None:
        raise ValueError(f"lora.quant_format: {quant_format} cannot run here: {refusal}")


def _described(scheme: QuantScheme) -> str:
    return f"{scheme.quant_format} in groups of {scheme.group_size}"


def quantize_base(module: Decoder, quantization: Quantization) -> None:
    """Quantise the frozen linear layers of a model on the meta device, in place."""
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
) -> tuple[dict[str, Tensor | Piece | RowTarget], Mapping[str, WeightRecipe], WeightSource]:
    """The arguments of `load_weights`: targets, recipes and source. Quantised weights need different ones."""
    parameters: dict[str, Tensor | Piece | RowTarget] = dict(base_parameters(module))
    for name, part in parameter_parts(module).items():
        if name not in parameters:  # an adapter's
            continue
        parameters[name] = Piece(module.get_parameter(name), part.rows, part.num_rows)
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
    """The scheme of a model's quantised base weights; None if they are not quantised."""
    return next((layer.scheme for layer in quantized_linears(module).values()), None)


def log_quantized(module: Decoder) -> None:
    """Log the memory of a quantised base over all ranks."""
    layers = quantized_linears(module)
    if not layers:
        return
    if module.config.has_experts:
        logger.warning("quantized: the experts are not quantised; they stay in the dtype of the base")
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
