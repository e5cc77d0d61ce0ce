"""Selects layers of a model by name and replaces them by quantised ones, before or after they have values.

Shapes: O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from xorl.core.models import Decoder
from xorl.core.nn import Linear
from xorl.core.nn.moe import ExpertLinear, Experts
from xorl.core.shards import is_dtensor
from xorl.kernels.quant import QuantScheme
from xorl.lora.arguments import check_instance, check_names
from xorl.lora.linear import TorchLinear
from xorl.lora.quantized import (
    QuantizedExpertLinear,
    QuantizedLayer,
    QuantizedLinear,
    fits_ranks,
    shape_refusal,
    write_rows_,
)
from xorl.lora.spec import matches_name, spec_of
from xorl.lora.targets import Site, resolve, sites_of

# How many names a message lists.
_MAX_LISTED = 3


def quantizable_layers(
    model: Decoder, exclude: Sequence[str], option: str, *, ignore_unknown: bool = False
) -> tuple[str, ...]:
    """The paths of the linear layers and experts in the decoder layers of `model`, except those that `exclude` names.

    An excluded name is a module's name in the checkpoint, successive parts of one, or a pattern with `*` for whole
    names; a module includes those inside it. Routers, embeddings, the head and norms are never quantised but may be
    named. Raises ValueError, starting with `option`, for an unknown name (unless ignore_unknown), and if only some of
    the matrices that a layer stacks are excluded.
    """
    names: dict[str, tuple[str, ...]] = {
        path: (path, *(part.name for part in model.logical.get(path, ()))) for path, _ in model.named_modules() if path
    }
    names.setdefault("lm_head", ("lm_head",))  # the embedding, if the two are tied
    layers = [
        path
        for path, module in model.named_modules()
        if type(module) in (Linear, ExpertLinear) and path.startswith("model.layers.")
    ]
    if not ignore_unknown:
        every = [one for known in names.values() for one in known]
        if unknown := [name for name in exclude if not any(_matches(one, name) for one in every)]:
            last = sorted({name.rpartition(".")[2] for path in layers for name in names[path]})
            raise ValueError(
                f"{option}: no module is named {', '.join(unknown)}; the linear layers are named {', '.join(last)}"
            )
    kept: list[str] = []
    for path in layers:
        module_name, *parts = names[path]
        excluded = [name for name in parts if any(_matches(name, target) for target in exclude)]
        is_excluded = any(_matches(module_name, target) or _matches(path, target) for target in exclude)
        if excluded and len(excluded) < len(parts) and not is_excluded:
            others = sorted(set(parts) - set(excluded))
            more = f" and {len(others) - _MAX_LISTED} others" * (len(others) > _MAX_LISTED)
            raise ValueError(
                f"{option}: {excluded[0]} shares one matrix with {', '.join(others[:_MAX_LISTED])}{more}: "
                "name all of them, or for attention set merge_qkv=False"
            )
        if not excluded and not is_excluded:
            kept.append(path)
    return tuple(kept)


def checkpoint_linears(model: Decoder, exclude: Sequence[str]) -> frozenset[str]:
    """The checkpoint names of the linear layers inside the decoder layers of `model`, except those in `exclude`.

    They include the projections of each expert, but not routers. `exclude` is as for `quantizable_layers`; unknown
    names are ignored.
    """
    found = {
        part.name
        for path, module in model.named_modules()
        if isinstance(module, (Linear, ExpertLinear)) and path.startswith("model.layers.")
        for part in model.logical[path]
    }
    return frozenset(name for name in found if not any(_matches(name, target) for target in exclude))


def _matches(name: str, target: str) -> bool:
    # A module's name includes the modules inside it.
    if "*" in target:
        return fnmatchcase(name, target) or fnmatchcase(name, f"{target}.*")
    return f".{target}." in f".{name}."


def quantize_layers(
    model: nn.Module,
    paths: Sequence[str],
    scheme: QuantScheme,
    option: str = "group_size",
    advice: str = "choose a group size that divides their rows, or name them in exclude",
) -> None:
    """Replace the layers at `paths` of `model`, in place, by uninitialised quantised ones.

    Raises ValueError, starting with `option` and with `advice`, before anything is changed, if a layer does not fit the
    scheme.
    """
    parts = _stacked_rows(model)
    layers: dict[str, Linear | ExpertLinear] = {}
    refused: list[str] = []
    for path in paths:
        layer = model.get_submodule(path)
        assert type(layer) in (Linear, ExpertLinear), f"{path} is {type(layer).__name__}"
        assert isinstance(layer, (Linear, ExpertLinear))
        layers[path] = layer
        if (refusal := shape_refusal(layer, scheme, parts.get(path, ()))) is not None:
            refused.append(f"{path} [{layer.out_features}, {layer.in_features}] ({refusal})")
    if refused:
        raise ValueError(
            f"{option}: {len(refused)} layers do not fit {scheme.quant_format}: {'; '.join(refused[:_MAX_LISTED])}; "
            f"{advice}{_fewer_ranks(layers.values(), scheme)}"
        )
    for path, layer in layers.items():
        model.set_submodule(path, _quantized(layer, scheme, parts.get(path, ())))


def _fewer_ranks(layers: Iterable[Linear | ExpertLinear], scheme: QuantScheme) -> str:
    """The advice to share matrices among fewer ranks, if that helps."""
    linears = [layer for layer in layers if isinstance(layer, Linear)]
    num_ranks = max((layer.ranks.size for layer in linears), default=1)
    works = [
        size
        for size in range(1, num_ranks + 1)
        if num_ranks % size == 0 and all(fits_ranks(layer, scheme, size) for layer in linears)
    ]
    if max(works) == num_ranks:
        return ""
    return f"; the nearest tensor_parallel_size that works is {max(works)}"


def _quantized(layer: Linear | ExpertLinear, scheme: QuantScheme, part_rows: Sequence[int]) -> QuantizedLayer:
    """An uninitialised replacement."""
    if isinstance(layer, ExpertLinear):
        return QuantizedExpertLinear(layer, scheme, part_rows)
    return QuantizedLinear(layer, scheme, part_rows)


@torch.no_grad()
def quantize_(
    model: nn.Module, scheme: QuantScheme, *, targets: Sequence[str] | str = "all-linear", exclude: Sequence[str] = ()
) -> tuple[str, ...]:
    """Quantise the current values of linear layers of any module, in place and frozen; returns the layers' paths.

    `targets` are as for `AdapterSpec`, which may also name experts of xorl's decoder; `exclude` names layers to leave
    as they are, in the same way. Call it before the model is sharded, and before adapters are added with `inject`.

    Raises ValueError, before anything is changed, for a name that matches nothing, if only some of the layers that a
    module stacks are chosen, and for layers that have an adapter, are on the meta device or do not fit the scheme.
    """
    check_instance("scheme", scheme, QuantScheme)
    check_names("exclude", exclude)
    sites = resolve(spec_of(targets), model)
    if unknown := [name for name in exclude if not any(matches_name(site.name, name) for site in sites)]:
        raise ValueError(f"exclude: no layer among the targets is named {', '.join(unknown)}")
    chosen = [site for site in sites if not any(matches_name(site.name, name) for name in exclude)]
    _check_whole(model, chosen)
    paths = dict.fromkeys(site.path for site in chosen)
    parts = _stacked_rows(model)
    layers: dict[str, nn.Linear | Linear | ExpertLinear] = {}
    for path in paths:
        layer = model.get_submodule(path)
        if not isinstance(layer, (nn.Linear, Linear, ExpertLinear)) or isinstance(layer, QuantizedLayer):
            raise ValueError(f"targets: {path!r} is a {type(layer).__name__}; only linear layers can be quantised")
        owner = model.get_submodule(path.rpartition(".")[0]) if isinstance(layer, ExpertLinear) else layer
        if isinstance(owner, (Linear, Experts)) and owner.adapter is not None:
            raise ValueError(f"targets: {path!r} has an adapter; quantise a model before adapters are added to it")
        if is_dtensor(layer.weight):
            raise ValueError(f"targets: {path!r} is sharded; quantise a model before it is sharded")
        if layer.weight.is_meta:
            raise ValueError(f"targets: {path!r} is on the meta device, without values to quantise")
        if (refusal := shape_refusal(layer, scheme, parts.get(path, ()))) is not None:
            raise ValueError(f"group_size: layer {path!r} does not fit {scheme.quant_format}: {refusal}; exclude it")
        layers[path] = layer
    for path, layer in layers.items():
        plain = TorchLinear(layer) if isinstance(layer, nn.Linear) else layer
        quantized = _quantized(plain, scheme, parts.get(path, ()))
        write_rows_(quantized, plain.weight)
        model.set_submodule(path, quantized)
    return tuple(paths)


def _check_whole(model: nn.Module, chosen: Sequence[Site]) -> None:
    """Raise ValueError for a module that stacks several layers of which only some are chosen."""
    names, paths = {site.name for site in chosen}, {site.path for site in chosen}
    for site in sites_of(model).values():
        if site.path in paths and site.name not in names:
            other = next(one.name for one in chosen if one.path == site.path)
            raise ValueError(
                f"targets: {other} shares one matrix with {site.name}, which would be quantised too; name both, "
                "or exclude both"
            )


def _stacked_rows(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The rows of each matrix that a layer stacks, by the layer's path; from the `stacked_rows` of modules."""
    return {
        f"{path}.{name}".removeprefix("."): tuple(rows)
        for path, module in model.named_modules()
        for name, rows in getattr(module, "stacked_rows", {}).items()
    }
