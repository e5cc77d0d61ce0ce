"""The weights of a placed model as Hugging Face names them, adapters folded in: made one parameter at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xorl.ckpt import TensorGroup, WeightRecipe, parameter_groups
from xorl.core.nn import Embedding, Linear
from xorl.core.parallel import ParallelModel
from xorl.lora import Adapter, QuantizedLinear, adapters, base_parameters, gather_rows, merged_rows, quantized_linears
from xorl.lora.linear import LowRank


class WholeWeights:
    """The native weights that `recipes` take apart, in `dtype`; None keeps a parameter's own, fp32 for what is made.

    Made are those that adapters are folded into, in fp32 and rounded once, and those that are kept quantised. Rows are
    cast before they are gathered, so half precision travels as such. `found` are the adapters to fold in, where they
    are one of a bank; None takes those of the model.

    Attributes:
        params: shapes and dtypes by native name; what a quantised weight holds is on the meta device.
    """

    def __init__(
        self,
        module: nn.Module,
        recipes: Mapping[str, WeightRecipe],
        dtype: torch.dtype | None,
        found: Mapping[str, Adapter] | None = None,
    ) -> None:
        own = base_parameters(module)
        self.params: dict[str, Tensor] = {name: own[name] for name in recipes}
        self._dtype = dtype
        self._pairs: dict[str, list[LowRank]] = {}
        self._made: dict[str, Linear | Embedding] = {}
        for adapter in (adapters(module) if found is None else found).values():
            name = f"{adapter.path}.weight"
            self._made[name] = adapter.layer
            self._pairs.setdefault(name, []).append(adapter.pair)
        for path, layer in quantized_linears(module).items():
            self._made[f"{path}.weight"] = layer
            self.params[f"{path}.weight"] = torch.empty(layer.out_features, layer.in_features, device="meta")

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """All of one weight, on every rank; collective where it is sharded."""
        layer = self._made.get(name)
        if layer is None:
            weight = self.params[name]
            return _gathered(weight, weight.to_local() if isinstance(weight, DTensor) else weight, self._dtype)
        rows = merged_rows(layer, self._pairs.get(name, ()))
        if isinstance(layer, QuantizedLinear):
            return gather_rows(layer, rows if self._dtype is None else rows.to(self._dtype))
        return _gathered(layer.weight, rows, self._dtype)


def _gathered(weight: Tensor, rows: Tensor, dtype: torch.dtype | None) -> Tensor:
    """All rows, of what this rank has in the place of its part of `weight`."""
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
    found: Mapping[str, Adapter] | None = None,
) -> Sequence[TensorGroup]:
    """All weights of `model` under the names of the files, to be made on `device` of rank 0; see `WholeWeights`.

    The groups are for the weights as they are now: none may be made after a forward pass or a change of the model.
    """
    # What an evaluation left gathered is rounded to the compute dtype, or in fp8 and not in the parameter at all.
    model.drop_gathered()
    weights = WholeWeights(model.module, recipes, dtype, found)
    return parameter_groups(weights.params, recipes, dtype=dtype, whole=weights.whole, device=device)
