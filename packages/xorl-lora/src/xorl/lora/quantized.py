"""Linear layers with a frozen quantised weight (QLoRA, arXiv:2305.14314), and conversion of a model's layers to them.

Each product, forward and backward, dequantises the weight and discards the result. Adapters work as on any other layer.
Layers to quantise are selected by name, before the model has memory. `QuantizedRows` then loads their values by ranges
of rows, sharded or whole.

Shapes: T tokens, I input features, O output features, N rows of a weight that this rank holds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xorl.core.models import Decoder
from xorl.core.nn import Linear
from xorl.core.nn.moe import ExpertLinear
from xorl.core.nn.parts import parameter_parts
from xorl.core.shards import is_dtensor, local_part, shard_groups
from xorl.kernels.quant import QuantizedWeight, QuantScheme, adapted_quantized_linear, dequantized, quantized_linear
from xorl.kernels.quant.nvfp4 import nvfp4_global_scale
from xorl.lora.linear import TorchLinear
from xorl.lora.spec import AdapterSpec, matches_name
from xorl.lora.targets import resolve


class QuantizedLinear(Linear):
    """x @ weight.T + bias in the dtype of x, with a frozen weight stored as `scheme` defines.

    Attributes:
        scheme: the format.
        part_rows: the rows of each matrix that the weight stacks; nvfp4 has one global scale per matrix.
        weight, weight_scale, weight_global_scale: the fields of `QuantScheme.stored`: codes, group scales, and for
            nvfp4 (else None) the global scale of each row.
        noise: None, or the (key, step) of noise on the weight in training mode; see `AdaptiveNoise`.
        noise_alpha: the amplitude of the noise.
    """

    stored: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_global_scale")

    weight_global_scale: nn.Parameter | None
    noise: Tensor | None

    def __init__(self, linear: Linear, scheme: QuantScheme, part_rows: Sequence[int] = ()) -> None:
        """Create a replacement for `linear` on its device, with uninitialised values.

        Raises ValueError if its shape does not fit the scheme.
        """
        nn.Module.__init__(self)
        if (refusal := scheme.shape_refusal(linear.in_features)) is not None:
            raise ValueError(refusal)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.scheme = scheme
        self.part_rows = tuple(part_rows) or (linear.out_features,)
        stored = {
            name: nn.Parameter(torch.empty(shape, dtype=dtype, device=linear.weight.device), requires_grad=False)
            for name, (shape, dtype) in scheme.stored(linear.out_features, linear.in_features).items()
        }
        self.weight = stored["codes"]
        self.weight_scale = stored["scales"]
        self.weight_global_scale = stored.get("global_scale")
        self.bias = linear.bias
        self.adapter = linear.adapter
        self.noise = None
        self.noise_alpha = 0.0
        self.train(linear.training)

    def base(self, x: Tensor) -> Tensor:
        """The output of the layer without its adapter."""
        noise = self.noise if self.training else None
        rows = x.reshape(-1, self.in_features)  # [T, I]
        y = quantized_linear(rows, *self._arguments(), noise, self.noise_alpha)
        y = y if x.dim() == 2 else y.unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias.to(x.dtype)

    def base_plus(self, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """base(x) + (x @ down.T) @ up.T for x [T, I], down [R, I] and up [O, R], all of one dtype."""
        noise = self.noise if self.training else None
        y = adapted_quantized_linear(x, down, up, *self._arguments(), noise, self.noise_alpha)
        return y if self.bias is None else y + self.bias.to(x.dtype)

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight [O, I] in `dtype`, without noise."""
        return dequantized(*self._arguments(), dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.scheme.quant_format}, group_size={self.scheme.group_size}"

    def _arguments(self) -> tuple[Tensor, Tensor, Tensor | None, str, int, int]:
        fields = (self.weight, self.weight_scale, self.weight_global_scale)
        return *fields, self.scheme.quant_format, self.scheme.group_size, self.out_features


def quantizable_linears(
    model: Decoder, exclude: Sequence[str], option: str, *, ignore_unknown: bool = False
) -> tuple[str, ...]:
    """The paths of the linear layers inside the decoder layers of `model`, except those that `exclude` names.

    An excluded name is a module's name in the checkpoint, the last parts of one, or a pattern with `*` for whole names.
    Embeddings, the head and norms are never quantised but may be named. Raises ValueError, starting with `option`, for
    an unknown name (unless ignore_unknown), and if only some of the matrices that a layer stacks are excluded.
    """
    names: dict[str, tuple[str, ...]] = {
        path: (path, *(part.name for part in model.logical.get(path, ()))) for path, _ in model.named_modules() if path
    }
    names.setdefault("lm_head", ("lm_head",))  # the embedding, if the two are tied
    linears = [
        path for path, module in model.named_modules() if type(module) is Linear and path.startswith("model.layers.")
    ]
    unknown = [name for name in exclude if not any(_matches(one, name) for known in names.values() for one in known)]
    if unknown and not ignore_unknown:
        last = sorted({name.rpartition(".")[2] for path in linears for name in names[path]})
        raise ValueError(
            f"{option}: no module is named {', '.join(unknown)}; the linear layers are named {', '.join(last)}"
        )
    kept: list[str] = []
    for path in linears:
        module_name, *parts = names[path]
        excluded = [name for name in parts if any(_matches(name, target) for target in exclude)]
        is_excluded = any(_matches(module_name, target) or _matches(path, target) for target in exclude)
        if excluded and len(excluded) < len(parts) and not is_excluded:
            raise ValueError(
                f"{option}: {excluded[0]} shares one matrix with {', '.join(sorted(set(parts) - set(excluded)))}: "
                "name all of them, or for attention set merge_qkv=False"
            )
        if not excluded and not is_excluded:
            kept.append(path)
    return tuple(kept)


def checkpoint_linears(model: Decoder, exclude: Sequence[str]) -> frozenset[str]:
    """The checkpoint names of the linear layers inside the decoder layers of `model`, except those in `exclude`.

    They include the projections of each expert, but not routers.

    `exclude` is as for `quantizable_linears`; unknown names are ignored.
    """
    found = {
        part.name
        for path, module in model.named_modules()
        if isinstance(module, (Linear, ExpertLinear)) and path.startswith("model.layers.")
        for part in model.logical[path]
    }
    return frozenset(name for name in found if not any(_matches(name, target) for target in exclude))


def _matches(name: str, target: str) -> bool:
    if "*" in target:
        return fnmatchcase(name, target)
    # A module's name includes the modules inside it.
    return matches_name(name, target) or name.startswith(f"{target}.")


def quantize_linears(model: nn.Module, paths: Sequence[str], scheme: QuantScheme, option: str = "group_size") -> None:
    """Replace the layers at `paths` of `model`, in place, by uninitialised quantised ones.

    Raises ValueError, starting with `option`, before anything is changed, if a layer does not fit the scheme.
    """
    linears = {path: model.get_submodule(path) for path in paths}
    refused: list[str] = []
    for path, linear in linears.items():
        assert type(linear) is Linear, f"{path} is {type(linear).__name__}"
        if (refusal := scheme.shape_refusal(linear.in_features)) is not None:
            refused.append(f"{path} [{linear.out_features}, {linear.in_features}] ({refusal})")
    if refused:
        raise ValueError(
            f"{option}: {len(refused)} layers do not fit {scheme.quant_format}: {'; '.join(refused[:3])}; choose a "
            "group size that divides their rows, or name them in exclude"
        )
    parts = _stacked_rows(model)
    for path, linear in linears.items():
        assert isinstance(linear, Linear)
        model.set_submodule(path, QuantizedLinear(linear, scheme, parts.get(path, ())))


@torch.no_grad()
def quantize_(
    model: nn.Module, scheme: QuantScheme, *, targets: Sequence[str] | str = "all-linear", exclude: Sequence[str] = ()
) -> tuple[str, ...]:
    """Quantise the current values of linear layers of any module, in place and frozen; returns the layers' paths.

    `targets` are as for `AdapterSpec`; `exclude` names layers to leave as they are, in the same way. Call it before the
    model is sharded, and before adapters are added with `inject`.

    Raises ValueError, before anything is changed, for a name that matches nothing, and for layers that have an adapter,
    are on the meta device or do not fit the scheme.
    """
    sites = resolve(AdapterSpec(targets="all-linear" if targets == "all-linear" else tuple(targets)), model)
    if unknown := [name for name in exclude if not any(matches_name(site.name, name) for site in sites)]:
        raise ValueError(f"exclude: no layer among the targets is named {', '.join(unknown)}")
    paths = dict.fromkeys(site.path for site in sites if not any(matches_name(site.name, name) for name in exclude))
    layers: dict[str, nn.Linear | Linear] = {}
    for path in paths:
        layer = model.get_submodule(path)
        if not isinstance(layer, (nn.Linear, Linear)) or isinstance(layer, QuantizedLinear):
            raise ValueError(f"targets: {path} is a {type(layer).__name__}; only linear layers can be quantised")
        if isinstance(layer, Linear) and layer.adapter is not None:
            raise ValueError(f"targets: {path} has an adapter; quantise a model before adapters are added to it")
        if is_dtensor(layer.weight):
            raise ValueError(f"targets: {path} is sharded; quantise a model before it is sharded")
        if layer.weight.is_meta:
            raise ValueError(f"targets: {path} is on the meta device, without values to quantise")
        if (refusal := scheme.shape_refusal(layer.in_features)) is not None:
            raise ValueError(f"group_size: {path} does not fit {scheme.quant_format}: {refusal}; exclude it")
        layers[path] = layer
    parts = _stacked_rows(model)
    for path, layer in layers.items():
        plain = layer if isinstance(layer, Linear) else TorchLinear(layer)
        quantized = QuantizedLinear(plain, scheme, parts.get(path, ()))
        write_rows_(quantized, plain.weight)
        model.set_submodule(path, quantized)
    return tuple(paths)


def _stacked_rows(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The rows of each matrix that a layer stacks, by the layer's path; from the `stacked_rows` of modules."""
    return {
        f"{path}.{name}".removeprefix("."): tuple(rows)
        for path, module in model.named_modules()
        for name, rows in getattr(module, "stacked_rows", {}).items()
    }


def quantized_linears(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The quantised layers of `model` by path, in module order."""
    return {path: module for path, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def local_rows(layer: QuantizedLinear) -> tuple[int, int]:
    """The range of the weight's rows that this rank holds; (0, 0) for none."""
    part, offset = local_part(layer.weight)
    first = offset[0] * layer.scheme.unit_rows
    last = min(first + len(part) * layer.scheme.unit_rows, layer.out_features)
    return (first, last) if first < last else (0, 0)


@torch.no_grad()
def read_rows(layer: QuantizedLinear) -> Tensor:
    """This rank's rows of the weight [N, I], dequantised to fp32."""
    first, last = local_rows(layer)
    if first == last:
        return torch.empty((0, layer.in_features), device=layer.weight.device)
    return layer.scheme.dequantize(_local(layer), last - first, torch.float32)


@torch.no_grad()
def write_rows_(layer: QuantizedLinear, rows: Tensor) -> None:
    """Quantise `rows` [N, I], of any floating dtype, and store them as this rank's rows of the weight.

    Collective if the weight is sharded, because global scales cover all shards of a matrix.
    """
    first, last = local_rows(layer)
    assert rows.shape == (last - first, layer.in_features)
    global_scale = _global_scale(layer, rows, first) if layer.weight_global_scale is not None else None
    if first == last:
        return
    quantized = layer.scheme.quantize(rows, global_scale)
    for target, values in zip(_local(layer), quantized, strict=True):
        if target is not None and values is not None:
            target.copy_(values)


@torch.no_grad()
def gather_rows(layer: QuantizedLinear, rows: Tensor) -> Tensor:
    """Gather each rank's values for its rows of the weight, [N, ...], to [O, ...]; collective if it is sharded."""
    first, last = local_rows(layer)
    whole = rows.new_zeros((layer.out_features, *rows.shape[1:]))
    whole[first:last] = rows
    for group in shard_groups(layer.weight):
        dist.all_reduce(whole, group=group)
    return whole


def _global_scale(layer: QuantizedLinear, rows: Tensor, first: int) -> Tensor:
    """The global scale of each of this rank's rows, which start at row `first`: fp32 [N]."""
    starts = [0, *accumulate(layer.part_rows)]
    largest = torch.zeros(len(layer.part_rows), device=rows.device)
    for index, (start, stop) in enumerate(pairwise(starts)):
        part = rows[max(start - first, 0) : max(stop - first, 0)]
        if part.numel():
            largest[index] = part.abs().amax().float()
    for group in shard_groups(layer.weight):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    scales = nvfp4_global_scale(largest).unbind()
    by_row = [scale.expand(count) for scale, count in zip(scales, layer.part_rows, strict=True)]
    return torch.cat(by_row)[first : first + len(rows)]


def _local(layer: QuantizedLinear) -> QuantizedWeight:
    """This rank's part of the quantised weight, sharing its memory."""
    codes, scales = (local_part(field.detach())[0] for field in (layer.weight, layer.weight_scale))
    global_scale = layer.weight_global_scale
    return QuantizedWeight(codes, scales, None if global_scale is None else local_part(global_scale.detach())[0])


class QuantizedRows:
    """A RowTarget that collects this rank's rows of a weight and then quantises them.

    Until `finish`, it holds the rows on the device, in the dtype of the source.
    """

    def __init__(self, layer: QuantizedLinear) -> None:
        self._layer = layer
        self._rows: Tensor | None = None
        self.shape = (layer.out_features, layer.in_features)
        self.rows = local_rows(layer)
        self.device = layer.weight.device

    def put(self, start: int, rows: Tensor) -> None:
        first, last = self.rows
        if self._rows is None:
            self._rows = torch.empty((last - first, self.shape[1]), dtype=rows.dtype, device=self.device)
        self._rows[start - first : start - first + len(rows)].copy_(rows)

    def finish(self) -> None:
        """Quantise the collected rows; see `write_rows_`."""
        first, last = self.rows
        rows = torch.zeros((last - first, self.shape[1]), device=self.device) if self._rows is None else self._rows
        self._rows = None
        write_rows_(self._layer, rows)


def quantized_rows(model: nn.Module) -> dict[str, QuantizedRows]:
    """A RowTarget for each quantised weight of `model`, by the weight's name; the model must have memory."""
    return {f"{path}.weight": QuantizedRows(layer) for path, layer in quantized_linears(model).items()}


def dense_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The named parameters of `model` that do not belong to quantised weights."""
    stored = {f"{path}.{name}" for path, layer in quantized_linears(model).items() for name in layer.stored}
    return ((name, parameter) for name, parameter in model.named_parameters() if name not in stored)


def num_parameters(model: nn.Module) -> int:
    """The number of parameters of `model`, in which each element of a quantised weight counts as one."""
    quantized = sum(layer.out_features * layer.in_features for layer in quantized_linears(model).values())
    parts = parameter_parts(model)
    return quantized + sum(
        parts[name].num_rows * math.prod(parameter.shape[1:]) if name in parts else parameter.numel()
        for name, parameter in dense_parameters(model)
    )


class AdaptiveNoise:
    """Noise on the quantised weights of a model in training mode (AQN), of `alpha` times half a quantisation step.

    It depends only on the seed, the layer's path, the optimizer step and the index in the weight. So it is the same
    however a step is split into micro-batches and ranks, and after a resume.
    """

    def __init__(self, model: nn.Module, *, alpha: float, seed: int) -> None:
        layers = quantized_linears(model)
        keys = [[_key(seed, path), 0] for path in layers]
        device = next((layer.weight.device for layer in layers.values()), torch.device("cpu"))
        self._noise = torch.tensor(keys, dtype=torch.int64, device=device).reshape(-1, 2)
        for layer, noise in zip(layers.values(), self._noise, strict=True):
            layer.noise, layer.noise_alpha = noise, alpha

    def set_step(self, step: int) -> None:
        """Set the optimizer step of the next passes."""
        self._noise[:, 1] = step


def _key(seed: int, path: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{path}/noise".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF
