"""Merges adapters into their base weights, after training or repeatedly during training.

All functions support sharded models and are then collective: adapters are gathered, base weights are not.

Shapes: N rows of a weight that this rank holds, I its columns, P output features of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from xorl.core.nn import Embedding, Linear
from xorl.core.nn.moe import ExpertLinear
from xorl.core.shards import copy_shard_, is_dtensor, local, local_box
from xorl.lora.experts import ExpertLowRank, fold_expert_pair_
from xorl.lora.inject import Adapter, adapters, remove_
from xorl.lora.linear import LowRank
from xorl.lora.quantized import (
    QuantizedExpertLinear,
    QuantizedLayer,
    QuantizedLinear,
    gather_rows,
    local_rows,
    quantized_layers,
    read_rows,
    write_rows_,
)

_MERGED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def merge_(model: nn.Module, *, dequantize_to: torch.dtype | None = None) -> None:
    """Merge every adapter of `model` into its base weight and remove it, in place.

    nn.Linear and nn.Embedding modules are restored. The base's parameters remain the same objects, and frozen.

    Quantised weights are quantised again, from fp32, which rounds the update too. With `dequantize_to`, all quantised
    layers of `model` become plain ones with a weight of this dtype instead, rounded once; `model` must be whole.

    Raises ValueError if `model` has no adapters or has them on the meta device, and with `dequantize_to` if a quantised
    weight is sharded.
    """
    if dequantize_to is not None:
        _merge_dequantized_(model, dequantize_to)
    else:
        fold_(model)
    remove_(model)


@torch.no_grad()
def _merge_dequantized_(model: nn.Module, dtype: torch.dtype) -> None:
    """Merge every adapter, and replace every quantised layer by a plain one with the merged weight."""
    if dtype not in _MERGED_DTYPES:
        raise ValueError(f"dequantize_to must be one of {', '.join(map(str, _MERGED_DTYPES))}; got {dtype!r}")
    quantized = quantized_layers(model)
    if sharded := [
        path
        for path, layer in quantized.items()
        if is_dtensor(layer.weight) or layer.share is not None  # experts divided among ranks
    ]:
        raise ValueError(f"dequantize_to: {sharded[0]!r} is sharded; merge a model that is whole")
    pairs = _pairs_by_layer(model)
    for layer, of_layer in pairs.items():
        if not isinstance(layer, QuantizedLayer):
            _fold_into_(layer, of_layer)
    for path, layer in quantized.items():
        assert isinstance(layer, (QuantizedLinear, QuantizedExpertLinear))
        rows = merged_rows(layer, pairs.get(layer, ())).to(dtype)
        model.set_submodule(path, layer.dense(nn.Parameter(rows, requires_grad=False)))


@torch.no_grad()
def fold_(model: nn.Module) -> None:
    """Merge every adapter of `model` into its base weight, in place, and keep the adapters unchanged.

    Quantised weights are quantised again, from fp32, with new scales.

    Call `init_adapters` next; otherwise the model applies each adapter twice.

    Raises ValueError if `model` has no adapters.
    """
    for layer, of_layer in _pairs_by_layer(model).items():
        _fold_into_(layer, of_layer)


def _pairs_by_layer(model: nn.Module) -> dict[Linear | Embedding | ExpertLinear, list[LowRank]]:
    found = adapters(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no adapters to merge")
    if any(adapter.A.is_meta for adapter in found.values()):
        raise ValueError(f"{type(model).__name__} has adapters on the meta device, without values to merge")
    pairs: dict[Linear | Embedding | ExpertLinear, list[LowRank]] = {}
    for adapter in found.values():
        pairs.setdefault(adapter.layer, []).append(adapter.pair)
    return pairs


def _fold_into_(layer: Linear | Embedding | ExpertLinear, pairs: Sequence[LowRank]) -> None:
    if isinstance(layer, QuantizedLayer):
        write_rows_(layer, merged_rows(layer, pairs))
    else:
        local(layer.weight).copy_(merged_rows(layer, pairs))


@torch.no_grad()
def merged_rows(layer: Linear | Embedding | ExpertLinear, pairs: Sequence[LowRank]) -> Tensor:
    """This rank's rows [N, I] of the weight of `layer` with the adapters `pairs` merged in, in fp32 (fp64 for fp64).

    W + scale * B @ A (arXiv:2106.09685), with rows scaled to the trained norms under DoRA (arXiv:2402.09353).
    """
    rows, first = _base_rows(layer)
    for pair in pairs:
        if isinstance(pair, ExpertLowRank):
            assert isinstance(layer, ExpertLinear)
            a, b = (full_tensor(pair.factor(leaf)).to(rows.dtype) for leaf in ("A", "B"))
            fold_expert_pair_(rows, pair, a, b, layer.out_features, first)
        elif isinstance(layer, Embedding):
            a, b = full_tensor(pair.A).to(rows.dtype), full_tensor(pair.B).to(rows.dtype)
            rows.addmm_(a[:, first : first + len(rows)].t(), b.t(), alpha=pair.scale)
        else:
            _fold_pair_(rows, pair, first)
    return rows


def _base_rows(layer: Linear | Embedding | ExpertLinear) -> tuple[Tensor, int]:
    """A copy of this rank's rows of the weight, in fp32 (fp64 for fp64), and the index of the first row."""
    if isinstance(layer, QuantizedLayer):
        return read_rows(layer), local_rows(layer)[0]
    part = local(layer.weight)
    return part.to(torch.promote_types(part.dtype, torch.float32), copy=True), local_box(layer.weight).offset[0]


def _fold_pair_(rows: Tensor, pair: LowRank, first: int) -> None:
    """Merge one adapter into `rows`, which start at row `first` of the layer's weight."""
    a, b = full_tensor(pair.A).to(rows.dtype), full_tensor(pair.B).to(rows.dtype)
    offset = None if pair.magnitude_offset is None else full_tensor(pair.magnitude_offset).to(rows.dtype)
    start, stop = max(pair.start, first), min(pair.stop, first + len(rows))
    if start >= stop:
        return
    adapted, pair_rows = rows[start - first : stop - first], slice(start - pair.start, stop - pair.start)
    base_norm = adapted.norm(dim=1)
    adapted.addmm_(b[pair_rows], a, alpha=pair.scale)
    if offset is not None:
        smallest = torch.finfo(torch.float32).tiny
        adapted.mul_(((base_norm + offset[pair_rows]) / adapted.norm(dim=1).clamp(min=smallest))[:, None])


@torch.no_grad()
def magnitude(adapter: Adapter) -> Tensor:
    """DoRA's trained norms of the rows of the adapted weight [P], fp32, whole on every rank; collective."""
    assert adapter.magnitude_offset is not None, "the adapter does not use DoRA"
    return _base_norms(adapter) + full_tensor(adapter.magnitude_offset)


@torch.no_grad()
def set_magnitude_(adapter: Adapter, values: Tensor) -> None:
    """Set DoRA's trained norms of the rows of the adapted weight to `values` [P], passed on every rank; collective."""
    assert adapter.magnitude_offset is not None, "the adapter does not use DoRA"
    copy_shard_(adapter.magnitude_offset, values.to(adapter.magnitude_offset.device) - _base_norms(adapter))


def _base_norms(adapter: Adapter) -> Tensor:
    layer = adapter.layer
    if isinstance(layer, QuantizedLayer):
        norms = gather_rows(layer, torch.linalg.vector_norm(read_rows(layer), dim=1))
    else:
        norms = full_tensor(torch.linalg.vector_norm(layer.weight.float(), dim=1))
    return norms[adapter.pair.start : adapter.pair.stop]


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank; collective if it is sharded."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor
