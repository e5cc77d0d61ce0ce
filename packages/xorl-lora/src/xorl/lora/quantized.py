"""Layers with a frozen quantised weight (QLoRA, arXiv:2305.14314): linear layers, and projections of experts.

Each product, forward and backward, dequantises the weight and discards the result. Adapters work as on any other layer.
`QuantizedRows` loads a weight by ranges of rows, sharded or whole. `quantize` selects a model's layers and replaces
them.

Shapes: T tokens, I input features, O output features, N rows of a weight that this rank holds; of experts, O counts
those of all experts of the module.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, zip_longest
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xorl.core.nn import Embedding, Linear
from xorl.core.nn.moe import ExpertLinear
from xorl.core.nn.share import Share, shares_of
from xorl.core.shards import Box, local, local_box, shard_groups
from xorl.kernels.experts.quantized import QuantizedExperts
from xorl.kernels.quant import QuantizedWeight, QuantScheme, adapted_quantized_linear, dequantized, quantized_linear
from xorl.kernels.quant.noise import held_pairs
from xorl.kernels.quant.nvfp4 import nvfp4_global_scale
from xorl.kernels.torch_private import all_gather
from xorl.lora.arguments import check_number
from xorl.lora.linear import TorchLinear, torch_linear

# The name under which the layers declare what they hold of the weight, as if it were not quantised.
DENSE = "dense_weight"


class QuantizedLayer(nn.Module):
    """A frozen weight [O, I], stored as `scheme` defines: what all quantised layers have in common.

    Attributes:
        scheme: the format.
        num_rows: O, of the rows that the module holds.
        share: what the module holds of a whole weight; None: all. `shares` says it for each of the fields, too.
        in_features: I.
        part_rows: the rows of each matrix that the weight stacks; nvfp4 has one global scale per matrix.
        weight, weight_scale, weight_global_scale: the fields of `QuantScheme.stored`: codes, group scales, and for
            nvfp4 (else None) the global scale of each row.
        noise: None, or the `state` of noise on the weight in training mode; see `AdaptiveNoise`.
        noise_alpha: the amplitude of the noise.
    """

    stored: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_global_scale")

    in_features: int
    weight: nn.Parameter
    weight_scale: nn.Parameter
    weight_global_scale: nn.Parameter | None
    noise: Tensor | None

    @property
    def whole_shape(self) -> tuple[int, int]:
        """The shape of the whole weight, of which other ranks' modules may hold some."""
        num_rows, num_columns = (
            (self.num_rows, self.in_features)
            if self.share is None
            else self.share.whole((self.num_rows, self.in_features))
        )
        return num_rows, num_columns

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight [O, I] in `dtype`, without noise."""
        return dequantized(*self._arguments(), dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.scheme.quant_format}, group_size={self.scheme.group_size}"

    def _store(
        self,
        like: Tensor,
        shape: tuple[int, int],
        scheme: QuantScheme,
        part_rows: Sequence[int],
        shares: Mapping[str, Share],
    ) -> None:
        """Create the fields of a weight of `shape` on the device of `like`, uninitialised.

        shares: what the module holds of the plain layer's parameters.
        """
        self.scheme = scheme
        self.num_rows, self.in_features = shape
        self.share = shares.get("weight")
        self.shares = dict(shares) if self.share is None else {**shares, **_stored_shares(self.share, scheme)}
        self.part_rows = tuple(part_rows)
        stored = {
            name: nn.Parameter(torch.empty(size, dtype=dtype, device=like.device), requires_grad=False)
            for name, (size, dtype) in scheme.stored(*shape).items()
        }
        self.weight = stored["codes"]
        self.weight_scale = stored["scales"]
        self.weight_global_scale = stored.get("global_scale")
        self.noise = None
        self.noise_alpha = 0.0

    def _fields(self) -> QuantizedWeight:
        return QuantizedWeight(self.weight, self.weight_scale, self.weight_global_scale)

    def _arguments(self) -> tuple[Tensor, Tensor, Tensor | None, str, int, int]:
        codes, scales, global_scale = self._fields()
        return codes, scales, global_scale, self.scheme.quant_format, self.scheme.group_size, self.num_rows

    def _noise_in_training(self) -> Tensor | None:
        return self.noise if self.training else None


class QuantizedLinear(QuantizedLayer, Linear):
    """x @ weight.T + bias in the dtype of x, with a frozen quantised weight."""

    def __init__(self, linear: Linear, scheme: QuantScheme, part_rows: Sequence[int] = ()) -> None:
        """Create a replacement for `linear` on its device, with uninitialised values.

        Raises ValueError if its shape does not fit the scheme.
        """
        nn.Module.__init__(self)
        _require_fit(linear, scheme, part_rows)
        self.out_features = linear.out_features
        shape = (linear.out_features, linear.in_features)
        self._store(linear.weight, shape, scheme, part_rows or (linear.out_features,), linear.shares)
        self.ranks, self.adds_bias = linear.ranks, linear.adds_bias
        self.bias = linear.bias
        self.adapter = linear.adapter
        self._is_torch = isinstance(linear, TorchLinear)
        self.train(linear.training)

    def dense(self, weight: nn.Parameter) -> nn.Linear | Linear:
        """The layer that this one has replaced, nn.Linear or xorl's, with `weight` [O, I] and without an adapter."""
        if self._is_torch:
            return torch_linear(self, weight)
        with torch.device("meta"):
            layer = Linear(self.in_features, self.out_features, bias=self.bias is not None)
        layer.weight, layer.bias = weight, self.bias
        return layer.train(self.training)

    def base(self, x: Tensor) -> Tensor:
        """The output of the layer without its adapter."""
        rows = x.reshape(-1, self.in_features)  # [T, I]
        y = quantized_linear(rows, *self._arguments(), self._noise_in_training(), self.noise_alpha)
        y = y if x.dim() == 2 else y.unflatten(0, x.shape[:-1])
        bias = self.added_bias(x.dtype)
        return y if bias is None else y + bias

    def base_plus(self, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """base(x) + (x @ down.T) @ up.T for x [T, I], down [R, I] and up [O, R], all of one dtype."""
        y = adapted_quantized_linear(x, down, up, *self._arguments(), self._noise_in_training(), self.noise_alpha)
        bias = self.added_bias(x.dtype)
        return y if bias is None else y + bias


class QuantizedExpertLinear(QuantizedLayer, ExpertLinear):
    """The frozen quantised weights of one projection of the experts that this rank holds, stored as one matrix.

    No block may cross from one expert's matrix into the next, so codes and scales are the same on any number of ranks.
    """

    def __init__(self, experts: ExpertLinear, scheme: QuantScheme, part_rows: Sequence[int] = ()) -> None:
        """Create a replacement for `experts` on their device, with uninitialised values.

        Raises ValueError if their shape does not fit the scheme.
        """
        nn.Module.__init__(self)
        _require_fit(experts, scheme, part_rows)
        self.num_experts, self.held = experts.num_experts, experts.held
        self.out_features = experts.out_features
        self.bias = experts.bias
        shape = (experts.num_experts * experts.out_features, experts.in_features)
        part_rows = part_rows or (experts.out_features,) * experts.num_experts
        self._store(experts.weight, shape, scheme, part_rows, experts.shares)
        self.train(experts.training)

    def dense(self, weight: nn.Parameter) -> ExpertLinear:
        """The projection that this one has replaced, with `weight` [O, I]."""
        assert not self.shares, "all experts are here"
        with torch.device("meta"):
            layer = ExpertLinear(self.num_experts, self.held, self.in_features, self.out_features)
        layer.weight, layer.bias = weight, self.bias
        return layer.train(self.training)

    def stacked(self, dtype: torch.dtype) -> QuantizedExperts:
        """What a kernel dequantises to [E, O / E, I], in the dtype of its input."""
        noise = self._noise_in_training()
        return QuantizedExperts(self._fields(), self.scheme, self.num_experts, self.num_rows, noise, self.noise_alpha)


def shape_refusal(
    layer: nn.Linear | Linear | ExpertLinear, scheme: QuantScheme, part_rows: Sequence[int]
) -> str | None:
    """The reason why the weight of `layer`, which stacks matrices of `part_rows`, cannot be quantised, or None."""
    if (refusal := scheme.shape_refusal(layer.in_features)) is not None:
        return refusal
    if isinstance(layer, ExpertLinear):
        for count in part_rows or (layer.out_features,):
            if count % scheme.unit_rows:
                return f"the {count} rows of each expert's matrices cannot be divided into blocks of {scheme.unit_rows}"
    elif isinstance(layer, Linear) and not fits_ranks(layer, scheme, layer.ranks.size):
        return f"{layer.ranks.size} ranks share it in parts that are not whole blocks of {scheme.group_size}"
    return None


def fits_ranks(layer: Linear, scheme: QuantScheme, num_ranks: int) -> bool:
    """Whether `num_ranks` could share the weight in whole groups; they must divide the number of those that do."""
    share = layer.shares.get("weight")
    if share is None or num_ranks == 1:
        return True
    if share.columns is not None:
        return share.num_columns % (num_ranks * scheme.group_size) == 0
    held = [
        (stop - start, number) for (start, stop), (number, _) in zip_longest(share.rows, share.copies, fillvalue=(1, 0))
    ]
    for size, number in held:
        num_parts = layer.ranks.size // number
        if size * num_parts % (min(num_ranks, num_parts) * scheme.unit_rows):
            return False
    return True


def _require_fit(layer: Linear | ExpertLinear, scheme: QuantScheme, part_rows: Sequence[int]) -> None:
    if (refusal := shape_refusal(layer, scheme, part_rows)) is not None:
        raise ValueError(refusal)


def _stored_shares(share: Share, scheme: QuantScheme) -> dict[str, Share]:
    """What a module holds of the fields of a weight, of which it holds `share`, and of the weight as if it were dense.

    Every rank has all global scales of a matrix that is divided by its columns.
    """
    rows = tuple((start // scheme.unit_rows, math.ceil(stop / scheme.unit_rows)) for start, stop in share.rows)
    units = replace(share, num_rows=math.ceil(share.num_rows / scheme.unit_rows), rows=rows)
    found = {DENSE: share, "weight": units, "weight_scale": units}
    if scheme.quant_format == "nvfp4" and share.columns is None:
        found["weight_global_scale"] = units
    if share.columns is not None:
        in_blocks = scheme.quant_format == "block_fp8"
        for name, width, dim in (
            ("weight", 1 if in_blocks else 2, 2 if in_blocks else 1),
            ("weight_scale", scheme.group_size, 1),
        ):
            start, stop = share.columns
            columns = (start // width, stop // width)
            found[name] = replace(units, columns=columns, num_columns=share.num_columns // width, column_dim=dim)
    return found


def share_of(layer: Linear | Embedding | ExpertLinear) -> Share | None:
    """What a layer's module holds of the weight, quantised or not; None: all."""
    return layer.share if isinstance(layer, QuantizedLayer) else layer.shares.get("weight")


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """The quantised layers of `model` by path, in module order."""
    return {path: module for path, module in model.named_modules() if isinstance(module, QuantizedLayer)}


def local_rows(layer: QuantizedLayer) -> tuple[int, int]:
    """The range of the module's rows of the weight that this rank holds; (0, 0) for none."""
    box = local_box(layer.weight)
    first = box.offset[0] * layer.scheme.unit_rows
    last = min(first + box.shape[0] * layer.scheme.unit_rows, layer.num_rows)
    return (first, last) if first < last else (0, 0)


@torch.no_grad()
def read_rows(layer: QuantizedLayer) -> Tensor:
    """This rank's rows of the weight [N, I], dequantised to fp32."""
    first, last = local_rows(layer)
    if first == last:
        return torch.empty((0, layer.in_features), device=layer.weight.device)
    return layer.scheme.dequantize(_local(layer), last - first, torch.float32)


@torch.no_grad()
def write_rows_(layer: QuantizedLayer, rows: Tensor) -> None:
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
def gather_rows(layer: QuantizedLayer, rows: Tensor) -> Tensor:
    """Gather each rank's values for its rows of the weight, [N, ...], to [O, ...]; collective if it is sharded.

    Rows that modules of other ranks hold are not included.
    """
    first, last = local_rows(layer)
    whole = rows.new_zeros((layer.num_rows, *rows.shape[1:]))
    whole[first:last] = rows
    for group in shard_groups(layer.weight):
        dist.all_reduce(whole, group=group)
    return whole


def _global_scale(layer: QuantizedLayer, rows: Tensor, first: int) -> Tensor:
    """The global scale of each of this rank's rows, which start at row `first`: fp32 [N]."""
    starts = [0, *accumulate(layer.part_rows)]
    largest = torch.zeros(len(layer.part_rows), device=rows.device)
    for index, (start, stop) in enumerate(pairwise(starts)):
        part = rows[max(start - first, 0) : max(stop - first, 0)]
        if part.numel():
            largest[index] = part.abs().amax().float()
    for group in shard_groups(layer.weight):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    if isinstance(layer, Linear) and layer.ranks.size > 1:
        group = layer.ranks.group
        largest = all_gather(largest, group.size, group.name).view(group.size, -1).amax(0)
    scales = nvfp4_global_scale(largest).unbind()
    by_row = [scale.expand(count) for scale, count in zip(scales, layer.part_rows, strict=True)]
    return torch.cat(by_row)[first : first + len(rows)]


def _local(layer: QuantizedLayer) -> QuantizedWeight:
    """This rank's part of the quantised weight, sharing its memory."""
    codes, scales = (local(field.detach()) for field in (layer.weight, layer.weight_scale))
    global_scale = layer.weight_global_scale
    return QuantizedWeight(codes, scales, None if global_scale is None else local(global_scale.detach()))


class QuantizedRows:
    """A RowTarget that collects this rank's rows of a weight and then quantises them.

    Until `finish`, it holds the rows on the device, in the dtype of the source.
    """

    def __init__(self, layer: QuantizedLayer) -> None:
        self._layer = layer
        self._rows: Tensor | None = None
        self.shape = layer.whole_shape
        first, last = local_rows(layer)
        self._num_rows = last - first
        held = Box((first, 0), (last - first, layer.in_features))
        boxes = [held] if layer.share is None else list(layer.share.boxes(held))
        self.ranges = [(box.offset[0], box.offset[0] + box.shape[0]) for box in boxes if first < last]
        self.device = layer.weight.device

    def put(self, start: int, rows: Tensor) -> None:
        if self._rows is None:
            self._rows = torch.empty((self._num_rows, self._layer.in_features), dtype=rows.dtype, device=self.device)
        if self._layer.share is not None and self._layer.share.columns is not None:
            rows = rows[:, slice(*self._layer.share.columns)]
        before = 0
        for first, last in self.ranges:
            if first <= start < last:
                self._rows[before + start - first :][: len(rows)].copy_(rows)
            before += last - first

    def finish(self) -> None:
        """Quantise the collected rows; see `write_rows_`."""
        shape = (self._num_rows, self._layer.in_features)
        rows = torch.zeros(shape, device=self.device) if self._rows is None else self._rows
        self._rows = None
        write_rows_(self._layer, rows)


def quantized_rows(model: nn.Module) -> dict[str, QuantizedRows]:
    """A RowTarget for each quantised weight of `model`, by the weight's name; the model must have memory."""
    return {f"{path}.weight": QuantizedRows(layer) for path, layer in quantized_layers(model).items()}


def dense_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The named parameters of `model` that do not belong to quantised weights."""
    stored = {f"{path}.{name}" for path, layer in quantized_layers(model).items() for name in layer.stored}
    return ((name, parameter) for name, parameter in model.named_parameters() if name not in stored)


def num_parameters(model: nn.Module) -> int:
    """The number of parameters of `model`, in which each element of a quantised weight counts as one."""
    quantized = sum(math.prod(layer.whole_shape) for layer in quantized_layers(model).values())
    shares = shares_of(model)
    return quantized + sum(
        math.prod(shares[name].whole(parameter.shape)) if name in shares else parameter.numel()
        for name, parameter in dense_parameters(model)
    )


class AdaptiveNoise:
    """Noise on the quantised weights of a model in training mode (AQN), of `alpha` times half a quantisation step.

    It depends only on the seed, the layer's path, the optimizer step and the index in the whole weight. So it is the
    same however a step is split into micro-batches and ranks, and after a resume.
    """

    def __init__(self, model: nn.Module, *, alpha: float, seed: int) -> None:
        check_number("alpha", alpha)
        layers = quantized_layers(model)
        states = [[_key(seed, path), 0, *_held_pairs(layer)] for path, layer in layers.items()]
        longest = max(map(len, states), default=2)
        padded = [state + [0] * (longest - len(state)) for state in states]
        device = next((layer.weight.device for layer in layers.values()), torch.device("cpu"))
        self._noise = torch.tensor(padded, dtype=torch.int64, device=device).reshape(-1, longest)
        for layer, state, noise in zip(layers.values(), states, self._noise, strict=True):
            layer.noise, layer.noise_alpha = noise[: len(state)], alpha

    def set_step(self, step: int) -> None:
        """Set the optimizer step of the next passes."""
        self._noise[:, 1] = step


def _held_pairs(layer: QuantizedLayer) -> list[int]:
    num_columns = layer.whole_shape[1]
    return held_pairs(num_columns, layer.share.rows, layer.share.columns) if layer.share else held_pairs(num_columns)


def _key(seed: int, path: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{path}/noise".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF
