"""Quantises the base weights of a model according to the QLoRA options."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from xorl.ckpt import Piece, WeightRecipe, WeightSource
from xorl.ckpt.load import RowTarget
from xorl.ckpt.reader import source_shapes
from xorl.config.local import LoraConfig
from xorl.core.models import Decoder
from xorl.core.nn.moe import ExpertLinear
from xorl.core.nn.share import shares_of
from xorl.kernels.quant import QuantScheme, quant_refusal
from xorl.lora.inject import base_parameters
from xorl.lora.prequantized import (
    dequantized_source,
    read_quantization,
    stored_parameters,
    stored_recipes,
    stored_source,
)
from xorl.lora.quantize import quantizable_layers, quantize_layers
from xorl.lora.quantized import quantized_layers, quantized_rows
from xorl.train.architecture import Architecture
from xorl.train.divided import piece

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Quantization:
    """How the weights of the base are quantised, in the model and in its checkpoint.

    Attributes:
        scheme: of the model's frozen layers; None if they are not quantised, so that quantised weights are dequantised.
        exclude: names and patterns of the layers that are not quantised.
        is_explicit: `exclude` is the user's; otherwise it is from the checkpoint's config and may name unknown layers.
        stored: the scheme of the checkpoint; None if it is not quantised.
    """

    scheme: QuantScheme | None
    exclude: tuple[str, ...]
    is_explicit: bool
    stored: QuantScheme | None

    def from_plain_weights(self) -> Quantization:
        """The same quantisation of weights from another source, which are not quantised there."""
        return replace(self, stored=None)


def read_options(lora: LoraConfig, hf_config: Mapping[str, object]) -> Quantization | None:
    """The quantisation that `lora` selects; None if neither the base's weights nor those that are read are quantised.

    Raises ValueError for options that do not suit the weights described by `hf_config`.
    """
    try:
        stored = read_quantization(hf_config)
    except ValueError as error:
        raise ValueError(f"model.model_path: the model's config.json has {error}") from error
    if not lora.enable_qlora:
        return None if stored is None else Quantization(None, (), is_explicit=False, stored=stored.scheme)
    assert lora.quant_group_size is not None, "resolved by the configuration"
    scheme = QuantScheme(lora.quant_format, lora.quant_group_size)
    if stored is None:
        return Quantization(scheme, tuple(lora.exclude_modules or ()), is_explicit=True, stored=None)
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
    return Quantization(scheme, stored.exclude, is_explicit=False, stored=stored.scheme)


def require_device(quantization: Quantization, device: torch.device) -> None:
    """Raise ValueError if `device` cannot compute with such weights."""
    if quantization.scheme is None:
        return
    quant_format = quantization.scheme.quant_format
    if (refusal := quant_refusal(quant_format, device)) is not None:
        raise ValueError(f"lora.quant_format: {quant_format} cannot run here: {refusal}")


def _described(scheme: QuantScheme) -> str:
    return f"{scheme.quant_format} in groups of {scheme.group_size}"


def quantize_base(module: Decoder, quantization: Quantization) -> None:
    """Quantise the frozen linear layers and experts of a model on the meta device, in place."""
    if quantization.scheme is None:
        return
    named = quantizable_layers(
        module, quantization.exclude, "lora.exclude_modules", ignore_unknown=not quantization.is_explicit
    )
    paths = [path for path in named if not module.get_parameter(f"{path}.weight").requires_grad]
    if not paths:
        raise ValueError("lora.exclude_modules: no linear layer is left to quantise; use enable_lora without qlora")
    if quantization.stored is None:
        quantize_layers(module, paths, quantization.scheme, "lora.quant_group_size")
    else:
        advice = "the checkpoint is quantised already, so its groups cannot be changed: start from the original model"
        quantize_layers(module, paths, quantization.scheme, "model.model_path", advice)


def base_targets(
    module: Decoder,
    recipes: Mapping[str, WeightRecipe],
    source: WeightSource,
    quantization: Quantization | None,
) -> tuple[dict[str, Tensor | Piece | RowTarget], Mapping[str, WeightRecipe], WeightSource]:
    """The arguments of `load_weights`: targets, recipes and source. Quantised weights need different ones."""
    parameters: dict[str, Tensor | Piece | RowTarget] = dict(base_parameters(module))
    for name, share in shares_of(module).items():
        if name in parameters:  # not an adapter's
            parameters[name] = piece(module.get_parameter(name), share)
    if quantization is None:
        return parameters, recipes, source
    if quantization.stored is not None:
        try:
            stored = stored_recipes(module, recipes)
        except ValueError as error:
            raise ValueError(f"model.model_path: {error}") from error
        quantized = stored_source(module, recipes, source, quantization.stored, source_shapes(recipes))
        if quantized.num_dequantized:
            logger.debug(
                "dequantized modules=%d of_checkpoint=%s",
                quantized.num_dequantized,
                _described(quantization.stored).replace(" ", "_"),
            )
        return parameters, stored, quantized
    for name in stored_parameters(module):
        parameters.pop(name)
    return parameters | quantized_rows(module), recipes, source


def dense_source(source: WeightSource, architecture: Architecture, dtype: torch.dtype = torch.float32) -> WeightSource:
    """`source`, a checkpoint of `architecture`, dequantised if it is quantised; `dtype` is what it says of them.

    Raises ValueError, starting with the key of config.json, for unsupported formats.
    """
    stored = read_quantization(architecture.hf_config)
    if stored is None:
        return source
    return dequantized_source(source, stored.scheme, source_shapes(architecture.recipes(merge_qkv=False)), dtype)


def scheme_of(module: nn.Module) -> QuantScheme | None:
    """The scheme of a model's quantised base weights; None if they are not quantised."""
    return next((layer.scheme for layer in quantized_layers(module).values()), None)


def log_quantized(module: Decoder, quantization: Quantization | None) -> None:
    """Log which layers of the base are quantised, by whom, and how much memory the base takes over all ranks."""
    layers = quantized_layers(module)
    if not layers or quantization is None:
        return
    experts = [one for one in module.modules() if isinstance(one, ExpertLinear)]
    if plain := sum(not one.stored for one in experts):
        logger.warning("quantized: %d of %d projections of experts are not quantised", plain, len(experts))
    shares, stored = shares_of(module), stored_parameters(module)
    sizes = {
        name: math.prod(shares[name].whole(parameter.shape)) if name in shares else parameter.numel()
        for name, parameter in base_parameters(module).items()
    }
    num_bytes = {name: count * module.get_parameter(name).element_size() for name, count in sizes.items()}
    num_weights = sum(math.prod(layer.whole_shape) for layer in layers.values())
    logger.debug(
        "quantized layers=%d of_experts=%d format=%s by=%s bytes_per_weight=%.4f base_gib=%.3f",
        len(layers),
        len(experts) - plain,
        _described(next(iter(layers.values())).scheme).replace(" ", "_"),
        "xorl" if quantization.stored is None else "the_checkpoint",
        sum(num_bytes[name] for name in stored) / num_weights,
        sum(num_bytes.values()) / 2**30,
    )
