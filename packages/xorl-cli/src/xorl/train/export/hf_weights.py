"""The weights of a placed model in Hugging Face naming, with adapters merged in, gathered one at a time.

Weight sync sends them to inference servers, optionally quantised to E4M3.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from xorl.ckpt import WeightRecipe
from xorl.ckpt.export import parameter_groups
from xorl.ckpt.layout import TensorRecord
from xorl.ckpt.tensor_file import TensorGroup
from xorl.core.nn import Embedding, Linear
from xorl.core.nn.moe import ExpertLinear
from xorl.core.parallel import ParallelModel
from xorl.kernels.quant.block_fp8 import quantize_block_fp8
from xorl.lora import Adapter, adapters
from xorl.lora.inject import base_parameters
from xorl.lora.linear import LowRank
from xorl.lora.merge import merged_rows
from xorl.lora.quantized import DENSE, QuantizedLayer, gather_rows, quantized_layers

BLOCK_SIZE = 128  # rows and columns; the only size that inference engines have kernels for


class ExportWeights:
    """Gathers every native weight that `recipes` map to the file, in full and in `dtype`.

    Weights with adapters are merged in fp32 and rounded once; quantised weights are dequantised. `dtype` None keeps
    each parameter's dtype, and fp32 for merged and dequantised weights; parameters whose recipes say so always keep
    theirs. Rows are cast before they are gathered, so less is sent in half precision. `merged_adapters`: the adapters
    to merge; None takes those of the model.

    Attributes:
        params: native name -> parameter, for shapes and dtypes; quantised weights are tensors on the meta device.
    """

    def __init__(
        self,
        model: ParallelModel,
        recipes: Mapping[str, WeightRecipe],
        dtype: torch.dtype | None,
        merged_adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        module = model.module
        self._shares = model.shares
        whole = base_parameters(model.whole)
        self._own = base_parameters(module)
        self.params: dict[str, Tensor] = {name: self._own.get(name, whole[name]) for name in recipes}
        self._dtype = dtype
        self._kept = {name for name, recipe in recipes.items() if recipe.keeps_dtype}
        self._pairs: dict[str, list[LowRank]] = {}
        self._computed: dict[
            str, Linear | Embedding | ExpertLinear
        ] = {}  # layers whose exported weight is not a parameter
        for adapter in (adapters(module) if merged_adapters is None else merged_adapters).values():
            name = f"{adapter.path}.weight"
            self._computed[name] = adapter.layer
            self._pairs.setdefault(name, []).append(adapter.pair)
        for path, layer in quantized_layers(module).items():
            assert isinstance(layer, (Linear, ExpertLinear))
            self._computed[f"{path}.weight"] = layer
        for path, layer in quantized_layers(model.whole).items():
            self.params[f"{path}.weight"] = torch.empty(layer.whole_shape, device="meta")

    @torch.no_grad()
    def gather(self, name: str) -> Tensor:
        """The full value of one weight, on every rank; collective if it is sharded, and in a pipeline."""
        return self._shares.from_stage(name.rpartition(".")[0], partial(self._gather, name))

    def _gather(self, name: str) -> Tensor:
        layer = self._computed.get(name)
        if layer is None:
            weight = self._own[name]
            rows = weight.to_local() if isinstance(weight, DTensor) else weight
            return self._shares.gather(name, _gather_like(weight, rows, None if name in self._kept else self._dtype))
        rows = merged_rows(layer, self._pairs.get(name, ()))
        if isinstance(layer, QuantizedLayer):
            held = gather_rows(layer, rows if self._dtype is None else rows.to(self._dtype))
            return held if layer.share is None else self._shares.gather(f"{name.removesuffix('weight')}{DENSE}", held)
        return self._shares.gather(name, _gather_like(layer.weight, rows, self._dtype))


def _gather_like(weight: Tensor, rows: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast `rows`, this rank's part of a tensor sharded like `weight`, and gather all of it."""
    rows = rows.detach() if dtype is None else rows.detach().to(dtype)
    if not isinstance(weight, DTensor):
        return rows
    shape, stride = weight.shape, weight.stride()
    return DTensor.from_local(rows, weight.device_mesh, weight.placements, shape=shape, stride=stride).full_tensor()


def hf_groups(
    model: ParallelModel,
    recipes: Mapping[str, WeightRecipe],
    *,
    dtype: torch.dtype,
    device: torch.device,
    merged_adapters: Mapping[str, Adapter] | None = None,
) -> Sequence[TensorGroup]:
    """All weights of `model` in Hugging Face naming; each group is gathered lazily to `device` of rank 0.

    The groups refer to the current weights: gather them before the next forward pass or change of the model. See
    `ExportWeights` for dtypes and adapters.
    """
    # Parameters that an evaluation left gathered are rounded to the compute dtype, or exist in fp8 only.
    model.drop_gathered()
    weights = ExportWeights(model, recipes, dtype, merged_adapters)
    return parameter_groups(weights.params, recipes, dtype=dtype, gather=weights.gather, device=device)


def in_block_fp8(groups: Sequence[TensorGroup], modules: Collection[str]) -> list[TensorGroup]:
    """Convert the weight [O, I] of each of `modules` to `weight` in E4M3 and `weight_scale_inv` in fp32.

    The scales are [ceil(O / 128), ceil(I / 128)], and a weight is code * scale (arXiv:2412.19437, section 3.3.2). This
    is the format of Hugging Face checkpoints with `quant_method` fp8. Values are quantised from the dtype of their
    group.
    """
    weights = {f"{module}.weight" for module in modules}
    return [_quantized(group, [name for name in group.records if name in weights]) for group in groups]


def _quantized(group: TensorGroup, weights: Sequence[str]) -> TensorGroup:
    if not weights:
        return group
    records = dict(group.records)
    for name in weights:
        shape = records[name].shape
        records[name] = TensorRecord(shape, "float8_e4m3fn")
        records[f"{name}_scale_inv"] = TensorRecord(tuple(math.ceil(size / BLOCK_SIZE) for size in shape), "float32")
    return TensorGroup(records, partial(_make, group, weights))


def _make(group: TensorGroup, weights: Sequence[str]) -> Mapping[str, Tensor]:
    tensors = dict(group.make())
    for name in weights:
        # On ranks other than 0, a group may be empty.
        if name in tensors:
            tensors[name], tensors[f"{name}_scale_inv"] = quantize_block_fp8(tensors[name], BLOCK_SIZE)
    return tensors
