"""Loads checkpoints whose weights are already quantised: parses their config and converts the layout of tensors.

    block_fp8   `quant_method: fp8` of Hugging Face: `weight` in E4M3 and `weight_scale_inv`
    nvfp4       `quant_algo: NVFP4` of NVIDIA's ModelOpt: `weight`, `weight_scale` and the scalar `weight_scale_2`
    nf4         bitsandbytes: flat `weight` and `weight.absmax`; the scales may be quantised too (nested)

Shapes: O output features, I input features.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn

from xorl.core.models.recipes import Rows, WeightRecipe, WeightSource
from xorl.kernels.quant import QuantFormat, QuantizedWeight, QuantScheme
from xorl.lora.quantized import quantized_layers

QUANTIZATION_KEY = "quantization_config"
# The `quant_method` of files whose experts `ModelSpec.checkpoint_view` dequantises without loss.
READ_AS_DENSE = "mxfp4"
# ModelOpt's own file, used if config.json does not contain its settings.
MODELOPT_FILE = "hf_quant_config.json"
# The tensors of a module in a checkpoint, by the fields of a QuantizedWeight.
_TENSORS: Mapping[QuantFormat, Mapping[str, str]] = MappingProxyType(
    {
        "block_fp8": {"codes": "weight", "scales": "weight_scale_inv"},
        "nvfp4": {"codes": "weight", "scales": "weight_scale", "global_scale": "weight_scale_2"},
        "nf4": {"codes": "weight", "scales": "weight.absmax"},
    }
)
# The parameters of a quantised layer, by these fields.
_PARAMETERS = MappingProxyType({"codes": "weight", "scales": "weight_scale", "global_scale": "weight_global_scale"})
# Suffixes of the tensors that a format stores beside a weight, including those of quantised activations.
STATE = ".weight.quant_state.bitsandbytes__nf4"
EXTRA = (
    ".weight_scale_inv",
    ".weight_scale",
    ".weight_scale_2",
    ".input_scale",
    ".k_scale",
    ".v_scale",
    ".weight.absmax",
    ".weight.quant_map",
    ".weight.nested_absmax",
    ".weight.nested_quant_map",
    STATE,
)


@dataclass(frozen=True)
class CheckpointQuantization:
    """The quantisation of a checkpoint: the scheme, and the names and patterns of excluded modules."""

    scheme: QuantScheme
    exclude: tuple[str, ...]


def read_quantization(hf_config: Mapping[str, object]) -> CheckpointQuantization | None:
    """The quantisation in a config.json, or None if the weights are not quantised, or are read as if they were not.

    Raises ValueError, starting with the key, for unsupported formats.
    """
    stored = hf_config.get(QUANTIZATION_KEY)
    if not stored:
        return None
    if not isinstance(stored, Mapping):
        raise ValueError(f"{QUANTIZATION_KEY} must be a mapping, got {stored!r}")
    method = str(stored.get("quant_method"))
    if method == READ_AS_DENSE:
        return None
    if method == "fp8":
        return _block_fp8(stored)
    if method == "bitsandbytes":
        return _nf4(stored)
    if method == "modelopt" or "quant_algo" in stored:
        return _nvfp4(stored)
    raise _unsupported(f"quant_method {method!r}")


def with_modelopt_file(hf_config: Mapping[str, object], content: object) -> dict[str, object]:
    """Merge the content of ModelOpt's own file into a config.json's mapping, under the common key."""
    quantization = content.get("quantization") if isinstance(content, Mapping) else None
    if not isinstance(quantization, Mapping):
        raise ValueError("the key 'quantization' is missing or not a mapping")
    return {QUANTIZATION_KEY: {"quant_method": "modelopt", **quantization}, **hf_config}


def _block_fp8(stored: Mapping[str, object]) -> CheckpointQuantization:
    size = stored.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or size[0] != size[1]:
        raise _unsupported(f"fp8 with weight_block_size {size!r}")
    return CheckpointQuantization(QuantScheme("block_fp8", int(size[0])), _names(stored, "modules_to_not_convert"))


def _nf4(stored: Mapping[str, object]) -> CheckpointQuantization:
    if not stored.get("load_in_4bit") or stored.get("bnb_4bit_quant_type") != "nf4":
        kind = "8 bits" if stored.get("load_in_8bit") else str(stored.get("bnb_4bit_quant_type"))
        raise _unsupported(f"bitsandbytes with {kind}")
    return CheckpointQuantization(QuantScheme("nf4", 64), _names(stored, "llm_int8_skip_modules"))


def _nvfp4(stored: Mapping[str, object]) -> CheckpointQuantization:
    algorithm = stored.get("quant_algo")
    if algorithm != "NVFP4":
        raise _unsupported(f"ModelOpt's {algorithm!r}")
    size = stored.get("group_size", 16)
    if not isinstance(size, int):
        raise _unsupported(f"NVFP4 with group_size {size!r}")
    return CheckpointQuantization(QuantScheme("nvfp4", size), _names(stored, "ignore", "exclude_modules"))


def _unsupported(what: str) -> ValueError:
    return ValueError(
        f"{QUANTIZATION_KEY}: {what} is not supported; use fp8 in square blocks, ModelOpt's NVFP4 or bitsandbytes' nf4"
    )


def _names(stored: Mapping[str, object], *keys: str) -> tuple[str, ...]:
    """The first of these keys that is a list, as names."""
    for key in keys:
        value = stored.get(key)
        if isinstance(value, list):
            return tuple(str(name) for name in value)
    return ()


def stored_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that hold quantised weights of `model`, by name."""
    return {
        f"{path}.{name}": parameter
        for path, layer in quantized_layers(model).items()
        for name in layer.stored
        if (parameter := getattr(layer, name)) is not None
    }


def stored_recipes(model: nn.Module, recipes: Mapping[str, WeightRecipe]) -> dict[str, WeightRecipe]:
    """`recipes`, with those of quantised weights replaced by recipes of their stored parameters, for a `StoredSource`.

    Raises ValueError if the blocks of a weight do not align with the matrices that it stacks.
    """
    result = dict(recipes)
    for path, layer in quantized_layers(model).items():
        recipe = result.pop(f"{path}.weight")
        if not isinstance(recipe, Rows):
            raise ValueError(
                f"{path}: quantised checkpoints are not supported for the weight layout of this model family"
            )
        unit = layer.scheme.unit_rows
        if len(recipe.row_counts) > 1 and any(count % unit for count in recipe.row_counts):
            raise ValueError(
                f"merge_qkv: {path} stacks matrices of {', '.join(map(str, recipe.row_counts))} rows, "
                f"which are not multiples of the checkpoint's block size {unit}: set it to false"
            )
        units = tuple(math.ceil(count / unit) for count in recipe.row_counts)
        modules = tuple(name.removesuffix(".weight") for name in recipe.sources)
        for name in layer.stored:
            parameter = getattr(layer, name)
            if parameter is not None:
                sources = tuple(f"{module}.{name}" for module in modules)
                share = layer.shares.get(name)
                shape = tuple(parameter.shape) if share is None else share.whole(parameter.shape)
                result[f"{path}.{name}"] = Rows(sources, units, shape[1:])
    return result


class StoredSource:
    """A `WeightSource` of a quantised checkpoint, with weights as quantised layers store them, or dequantised.

    Codes are named `{module}.weight`, scales `{module}.weight_scale` and `{module}.weight_global_scale`; they are read
    by units of rows (see `QuantScheme.stored`). Dequantised weights are fp32. Other tensors of quantised modules are
    hidden; the rest is unchanged.
    """

    def __init__(
        self,
        source: WeightSource,
        scheme: QuantScheme,
        stored: Mapping[str, tuple[int, int]],
        dense: Mapping[str, tuple[int, int]] = MappingProxyType({}),
        *,
        dense_dtype: torch.dtype = torch.float32,
    ) -> None:
        """stored, dense: [O, I] of the modules to read as they are, and to dequantise, by their names in `source`.

        Modules that the checkpoint does not quantise may be in `dense`, too. `dense_dtype` is what `dtype` returns for
        dequantised weights, for callers that write them.
        """
        self._source = source
        self._scheme = scheme
        present, tensors = set(source.names()), _TENSORS[scheme.quant_format]
        quantized = {module for module in dense if f"{module}.{tensors['scales']}" in present}
        self._shapes = {**stored, **{module: dense[module] for module in quantized}}
        # A tensor that is missing in the checkpoint is missing here, too.
        self._stored = {
            f"{module}.{_PARAMETERS[field]}": (module, field, shape, dtype)
            for module, (rows, columns) in stored.items()
            for field, (shape, dtype) in scheme.stored(rows, columns).items()
            if f"{module}.{tensors[field]}" in present
        }
        self._dequantized = {f"{module}.weight": module for module in quantized}
        self._dense_dtype = dense_dtype
        self._names = {name for name in present if not name.endswith(EXTRA)} | self._stored.keys()
        self._states: dict[str, Mapping[str, object]] = {}

    @property
    def num_dequantized(self) -> int:
        """The number of modules that are dequantised."""
        return len(self._dequantized)

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._dequantized:
            return self._described(self._dequantized[name], self._shapes[self._dequantized[name]])
        if name not in self._stored:
            return self._source.shape(name)
        module, field, shape, _ = self._stored[name]
        return self._described(module, shape) if field == "codes" else shape

    def _described(self, module: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`shape`, or that of a tensor of codes in another layout, so that the caller's shape check rejects it."""
        actual = self._source.shape(f"{module}.weight")
        return shape if math.prod(actual) == self._num_codes(module) else actual

    def dtype(self, name: str) -> torch.dtype:
        if name in self._dequantized:
            return self._dense_dtype
        return self._stored[name][3] if name in self._stored else self._source.dtype(name)

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        if name in self._dequantized:
            return self._dense(self._dequantized[name], start, stop)
        if name not in self._stored:
            return self._source.read(name, start, stop)
        module, field, shape, _ = self._stored[name]
        return self._field(module, field, start or 0, shape[0] if stop is None else stop)

    def _dense(self, module: str, start: int | None, stop: int | None) -> Tensor:
        """Rows [start, stop) of a weight, dequantised."""
        rows, columns = self._shapes[module]
        start, stop = start or 0, rows if stop is None else stop
        if start == stop:
            return torch.empty(0, columns)
        unit = self._scheme.unit_rows
        first, last = start // unit, math.ceil(stop / unit)
        fields = {field: self._field(module, field, first, last) for field in self._scheme.stored(rows, columns)}
        weight = QuantizedWeight(fields["codes"], fields["scales"], fields.get("global_scale"))
        dense = self._scheme.dequantize(weight, min(last * unit, rows) - first * unit, torch.float32)
        return dense[start - first * unit : stop - first * unit]

    def _field(self, module: str, field: str, start: int, stop: int) -> Tensor:
        """Units [start, stop) of a field of a QuantizedWeight."""
        if self._scheme.quant_format == "nf4":
            return self._nf4(module, field, start, stop)
        if self._scheme.quant_format == "nvfp4":
            return self._nvfp4(module, field, start, stop)
        return self._block_fp8(module, field, start, stop)

    def _num_codes(self, module: str) -> int:
        """The expected number of elements of the checkpoint's tensor of codes."""
        rows, columns = self._shapes[module]
        return rows * columns if self._scheme.quant_format == "block_fp8" else rows * columns // 2

    def _block_fp8(self, module: str, field: str, start: int, stop: int) -> Tensor:
        if field == "scales":
            return self._source.read(f"{module}.weight_scale_inv", start, stop).float()
        side, (num_rows, num_columns) = self._scheme.group_size, self._shapes[module]
        codes = self._source.read(f"{module}.weight", start * side, min(stop * side, num_rows)).view(torch.uint8)
        padded = codes.new_zeros(((stop - start) * side, num_columns))
        padded[: len(codes)] = codes
        return padded.view(-1, side, num_columns)

    def _nvfp4(self, module: str, field: str, start: int, stop: int) -> Tensor:
        if field == "codes":
            return self._source.read(f"{module}.weight", start, stop)
        if field == "scales":
            return self._source.read(f"{module}.weight_scale", start, stop).view(torch.uint8)
        return self._source.read(f"{module}.weight_scale_2").float().reshape(1).expand(stop - start)

    def _nf4(self, module: str, field: str, start: int, stop: int) -> Tensor:
        width = self._shapes[module][1]
        if field == "codes":
            half = width // 2
            return self._source.read(f"{module}.weight", start * half, stop * half).reshape(stop - start, half)
        groups = width // self._scheme.group_size
        first, last = start * groups, stop * groups
        scales = self._source.read(f"{module}.weight.absmax", first, last)
        if scales.dtype == torch.uint8:
            scales = self._nested(module, scales, first)
        return scales.float().reshape(stop - start, groups)

    def _nested(self, module: str, codes: Tensor, first: int) -> Tensor:
        """Dequantise nested scales: block-wise 8-bit codes of the scales minus their mean (arXiv:2305.14314)."""
        if module not in self._states:
            self._states[module] = json.loads(bytes(self._source.read(f"{module}{STATE}").tolist()))
        state = self._states[module]
        block = int(cast(int, state["nested_blocksize"]))
        values = self._source.read(f"{module}.weight.nested_quant_map").float()[codes.int()]
        largest = self._source.read(f"{module}.weight.nested_absmax").float()
        blocks = torch.arange(first, first + len(codes)) // block
        return values * largest[blocks] + float(cast(float, state["nested_offset"]))


def stored_source(
    model: nn.Module,
    recipes: Mapping[str, WeightRecipe],
    source: WeightSource,
    scheme: QuantScheme,
    shapes: Mapping[str, tuple[int, ...]],
) -> StoredSource:
    """Wrap `source`, a checkpoint quantised by `scheme` under the names of `recipes`, for use with `stored_recipes`.

    Weights of the model's quantised layers are read as they are, all others are dequantised. `shapes` are those of all
    tensors that the recipes read.
    """
    stored: dict[str, tuple[int, int]] = {}
    for path, layer in quantized_layers(model).items():
        recipe = recipes[f"{path}.weight"]
        assert isinstance(recipe, Rows), "checked in stored_recipes"
        for name, count in zip(recipe.sources, recipe.row_counts, strict=True):
            stored[name.removesuffix(".weight")] = (count, layer.whole_shape[1])
    dense = {module: shape for module, shape in _matrices(shapes).items() if module not in stored}
    return StoredSource(source, scheme, stored, dense)


def dequantized_source(
    source: WeightSource, scheme: QuantScheme, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> StoredSource:
    """Wrap `source`, a checkpoint quantised by `scheme`, to read all weights dequantised.

    `shapes` are those of the dequantised tensors by name, and `dtype` is the one to name for them.
    """
    return StoredSource(source, scheme, {}, _matrices(shapes), dense_dtype=dtype)


def _matrices(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """[O, I] of the modules whose weight is a matrix."""
    suffix = ".weight"
    return {
        name.removesuffix(suffix): (shape[0], shape[1])
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(suffix)
    }
