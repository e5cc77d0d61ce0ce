"""Converts between the adapters in a model, sharded or not, and PEFT's files."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from xorl.core.models.recipes import WeightSource
from xorl.core.shards import copy_shard_
from xorl.lora.experts import ExpertLowRank
from xorl.lora.inject import Adapter, adapters
from xorl.lora.merge import full_tensor, magnitude, set_magnitude_
from xorl.lora.peft.config import AdapterConfig, shared_value, shortest_names
from xorl.lora.peft.layout import AdapterLayout, keys_of
from xorl.lora.spec import AdapterSpec
from xorl.lora.targets import modules_to_save, sites_of


@dataclass(frozen=True)
class FileTensors:
    """fp32 tensors of a file that are made together: their shapes by name.

    `make` returns their values on every rank, and is collective if the model is sharded.
    """

    shapes: Mapping[str, tuple[int, ...]]
    make: Callable[[], Mapping[str, Tensor]]


def config_of(
    model: nn.Module,
    spec: AdapterSpec,
    *,
    base: str | None,
    task_type: str | None = "CAUSAL_LM",
    transposed: Collection[str] = (),
    found: Mapping[str, Adapter] | None = None,
) -> AdapterConfig:
    """The adapter_config.json of the adapters in `model`, which were injected with `spec`.

    Targets, ranks and alphas are those of the existing adapters, under the shortest unambiguous names. `transposed` are
    the linear layers whose weight is stored as [in, out] in the base's files; these must be all adapted linear layers,
    or none. `task_type` is None for modules that are no language models. `found` overrides the adapters, for those of a
    bank.
    """
    adapted = adapters(model) if found is None else found
    found = {name: adapter for adapter in adapted.values() for name in adapter.members}
    linear = {name for name, adapter in found.items() if not adapter.is_embedding}
    fan_in_fan_out = linear & set(transposed)
    if fan_in_fan_out and fan_in_fan_out != linear:
        raise ValueError(
            f"PEFT cannot describe adapters on weights of both orientations: {sorted(linear - fan_in_fan_out)[0]} is "
            f"stored as [out, in], {sorted(fan_in_fan_out)[0]} as [in, out]"
        )
    rank, rank_pattern = shared_value({name: adapter.rank for name, adapter in found.items()})
    alpha, alpha_pattern = shared_value({name: adapter.alpha for name, adapter in found.items()})
    written = replace(
        spec,
        rank=rank,
        alpha=alpha,
        targets=shortest_names(
            found, [name for site in sites_of(model).values() for name in site.members or (site.name,)]
        ),
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        # Full names, because PEFT matches `norm` with every name that ends with it, such as `q_norm`.
        modules_to_save=tuple(modules_to_save(spec, model)),
    )
    for name, adapter in found.items():
        assert written.scale_of(name) == adapter.scale, f"the written config would change the scale of {name}"
    return AdapterConfig(written, base, task_type, fan_in_fan_out=bool(fan_in_fan_out))


def adapter_tensors(
    model: nn.Module,
    found: Mapping[str, Adapter] | None = None,
    gather: Callable[[Tensor], Tensor] = full_tensor,
) -> list[FileTensors]:
    """The tensors of the adapters in `model`, or of `found` (from a bank), by their names in a file.

    Adapters on experts are a pair of tensors for each expert, as inference engines read them. Modules trained whole are
    not included. `gather` takes a parameter, maybe sharded, and returns its whole value.
    """
    tensors: list[FileTensors] = []
    for adapter in (adapters(model) if found is None else found).values():
        kind = "embedding" if adapter.is_embedding else "linear"
        keys = [keys_of(name, kind) for name in adapter.members]
        for leaf, parameter in enumerate((adapter.A, adapter.B)):
            tensors.append(_stacked_tensors([key[leaf] for key in keys], adapter, parameter, gather))
        if adapter.magnitude_offset is not None:
            [(_, _, name)] = keys
            tensors.append(
                FileTensors({name: tuple(adapter.magnitude_offset.shape)}, partial(_magnitude_of, name, adapter))
            )
    return tensors


def _stacked_tensors(
    names: Sequence[str], adapter: Adapter, parameter: Tensor, gather: Callable[[Tensor], Tensor]
) -> FileTensors:
    """One tensor for each name, of the rows of `parameter` in order."""
    held = len(adapter.pair.held) if isinstance(adapter.pair, ExpertLowRank) else 1
    shape = (parameter.shape[0] // held, *parameter.shape[1:])

    def make() -> dict[str, Tensor]:
        whole = gather(parameter)
        assert whole.shape[0] == shape[0] * len(names), "gathered over all ranks that hold experts"
        return {name: rows.contiguous() for name, rows in zip(names, whole.split(shape[0]), strict=True)}

    return FileTensors(dict.fromkeys(names, shape), make)


def _magnitude_of(name: str, adapter: Adapter) -> dict[str, Tensor]:
    return {name: magnitude(adapter)}


@torch.no_grad()
def load_adapters(model: nn.Module, layout: AdapterLayout, source: WeightSource) -> None:
    """Load the values of a file, read on every rank, into the adapters in `model`; collective with DoRA.

    The base's weights must be loaded first. Base tensors in the file are not loaded here. Raises ValueError if the
    file's adapters do not match those of the model.
    """
    found = adapters(model)
    names = {name for adapter in found.values() for name in adapter.members}
    if names != set(layout.modules):
        differing = sorted(names ^ layout.modules.keys())
        raise ValueError(
            f"the adapters of the model and the file differ: only one of them has {', '.join(differing[:5])}"
        )
    for adapter in found.values():
        count = len(adapter.pair.held) if isinstance(adapter.pair, ExpertLowRank) else 1
        expected = tuple((each.shape[0] // count, *each.shape[1:]) for each in (adapter.A, adapter.B))
        for name in adapter.members:
            module = layout.modules[name]
            stored = (layout.shapes[module.a], layout.shapes[module.b])
            if expected != stored:
                raise ValueError(
                    f"{name}: A and B are {list(map(list, stored))} in the file, {list(map(list, expected))} in the "
                    "model"
                )
    for adapter in found.values():
        held = adapter.pair.held_members if isinstance(adapter.pair, ExpertLowRank) else adapter.members
        modules = [layout.modules[name] for name in held]
        copy_shard_(adapter.A, torch.cat([source.read(module.a) for module in modules]))
        copy_shard_(adapter.B, torch.cat([source.read(module.b) for module in modules]))
        if modules[0].magnitude is not None:
            set_magnitude_(adapter, source.read(modules[0].magnitude).float().flatten())
