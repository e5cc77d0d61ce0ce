"""The weights of a placed model in Hugging Face naming, with adapters merged in, gathered one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xorl.ckpt import WeightRecipe
from xorl.ckpt.export import parameter_groups
from xorl.ckpt.tensor_file import TensorGroup
from xorl.core.nn import Embedding, Linear
from xorl.core.parallel import ParallelModel
from xorl.lora import Adapter, adapters
from xorl.lora.inject import base_parameters
from xorl.lora.linear import LowRank
from xorl.lora.merge import merged_rows
from xorl.lora.quantized import QuantizedLinear, gather_rows, quantized_linears


class ExportWeights:
    """The full value of every native weight that `recipes` map to the file, in `dtype`.

    Weights with adapters are merged in fp32 and rounded once; quantised weights are dequantised. `dtype` None keeps
    each parameter's dtype, and fp32 for merged and dequantised weights. Rows are cast before they are gathered, so
    half precision is also sent as such. `merged_adapters`: the adapters to merge; None takes those of the model.

    Attributes:
        params: native name -> parameter, for shapes and dtypes; quantised weights are tensors on the meta device.
    """

    def __init__(
        self,
        module: nn.Module,
        recipes: Mapping[str, WeightRecipe],
        dtype: torch.dtype | None,
        merged_adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        parameters = base_parameters(module)
        self.params: dict[str, Tensor] = {name: parameters[name] for name in recipes}
        self._dtype = dtype
        self._pairs: dict[str, list[LowRank]] = {}
        self._computed: dict[str, Linear | Embedding] = {}  # layers whose exported weight is not a parameter
        for adapter in (adapters(module) if merged_adapters is None else merged_adapters).values():
            name = f"{adapter.path}.weight"
            self._computed[name] = adapter.layer
            self._pairs.setdefault(name, []).append(adapter.pair)
        for path, layer in quantized_linears(module).items():
            self._computed[f"{path}.weight"] = layer
            self.params[f"{path}.weight"] = torch.empty(layer.out_features, layer.in_features, device="meta")

    @torch.no_grad()
    def gather(self, name: str) -> Tensor:
        """The full value of one weight, on every rank; collective if it is sharded."""
        layer = self._computed.get(name)
        if layer is None:
            weight = self.params[name]
            return _gather_like(weight, weight.to_local() if isinstance(weight, DTensor) else weight, self._dtype)
        rows = merged_rows(layer, self._pairs.get(name, ()))
        if isinstance(layer, QuantizedLinear):
            return gather_rows(layer, rows if self._dtype is None else rows.to(self._dtype))
        return _gather_like(layer.weight, rows, self._dtype)


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
    weights = ExportWeights(model.module, recipes, dtype, merged_adapters)
    return parameter_groups(weights.params, recipes, dtype=dtype, gather=weights.gather, device=device)
