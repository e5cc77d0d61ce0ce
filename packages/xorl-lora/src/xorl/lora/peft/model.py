"""Converts between the adapters in a model, sharded or not, and PEFT's files."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from xorl.core.models.recipes import WeightSource
from xorl.core.shards import copy_shard_
from xorl.lora.inject import Adapter, adapters
from xorl.lora.merge import full_tensor, magnitude, set_magnitude_
from xorl.lora.peft.config import AdapterConfig, shared_value, shortest_names
from xorl.lora.peft.layout import AdapterLayout, keys_of
from xorl.lora.spec import AdapterSpec
from xorl.lora.targets import modules_to_save, sites_of


@dataclass(frozen=True)
class FileTensor:
    """An fp32 tensor of a file. `make` returns its values on every rank, and is collective if the model is sharded."""

    shape: tuple[int, ...]
    make: Callable[[], Tensor]


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
    found = adapters(model) if found is None else found
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
        targets=shortest_names(found, sites_of(model)),
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        # Full names, because PEFT matches `norm` with every name that ends with it, such as `q_norm`.
        modules_to_save=tuple(modules_to_save(spec, model)),
    )
    for name, adapter in found.items():
        assert written.scale_of(name) == adapter.scale, f"the written config would change the scale of {name}"
    return AdapterConfig(written, base, task_type, fan_in_fan_out=bool(fan_in_fan_out))


def adapter_tensors(model: nn.Module, found: Mapping[str, Adapter] | None = None) -> dict[str, FileTensor]:
    """The tensors of the adapters in `model`, or of `found` (from a bank), by their names in a file.

    Modules trained whole are not included.
    """
    tensors: dict[str, FileTensor] = {}
    for name, adapter in (adapters(model) if found is None else found).items():
        a, b, magnitudes = keys_of(name, "embedding" if adapter.is_embedding else "linear")
        tensors[a] = FileTensor(tuple(adapter.A.shape), partial(full_tensor, adapter.A))
        tensors[b] = FileTensor(tuple(adapter.B.shape), partial(full_tensor, adapter.B))
        if adapter.magnitude_offset is not None:
            tensors[magnitudes] = FileTensor(tuple(adapter.magnitude_offset.shape), partial(magnitude, adapter))
    return tensors


@torch.no_grad()
def load_adapters(model: nn.Module, layout: AdapterLayout, source: WeightSource) -> None:
    """Load the values of a file, read on every rank, into the adapters in `model`; collective with DoRA.

    The base's weights must be loaded first. Base tensors in the file are not loaded here. Raises ValueError if the
    file's adapters do not match those of the model.
    """
    found = adapters(model)
    if found.keys() != layout.modules.keys():
        differing = sorted(found.keys() ^ layout.modules.keys())
        raise ValueError(
            f"the adapters of the model and the file differ: only one of them has {', '.join(differing[:5])}"
        )
    for name, adapter in found.items():
        module = layout.modules[name]
        expected, stored = (adapter.A.shape, adapter.B.shape), (layout.shapes[module.a], layout.shapes[module.b])
        if expected != stored:
            raise ValueError(
                f"{name}: A and B are {list(map(list, stored))} in the file, {list(map(list, expected))} in the model"
            )
    for name, adapter in found.items():
        module = layout.modules[name]
        copy_shard_(adapter.A, source.read(module.a))
        copy_shard_(adapter.B, source.read(module.b))
        if module.magnitude is not None:
            set_magnitude_(adapter, source.read(module.magnitude).float().flatten())
