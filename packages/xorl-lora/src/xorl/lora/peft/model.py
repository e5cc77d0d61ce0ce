"""Converts between the adapters in a model, sharded or not, and PEFT's files."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from xorl.core.models import Decoder
from xorl.core.models.recipes import WeightSource
from xorl.core.models.stacks import ExpertStack
from xorl.core.shards import copy_shard_
from xorl.kernels.arguments import check_choice
from xorl.lora.arguments import check_instance
from xorl.lora.experts import ExpertLowRank
from xorl.lora.inject import Adapter, adapters
from xorl.lora.linear import Leaf
from xorl.lora.merge import full_tensor, magnitude, set_magnitude_
from xorl.lora.peft.config import AdapterConfig, ExpertForm, TaskType, shared_value, shortest_names
from xorl.lora.peft.forms import ExpertFactor, ExpertFactors, chosen_form, expert_tensors, settings_of
from xorl.lora.peft.layout import AdapterLayout, FileTensors, keys_of, read_shared
from xorl.lora.spec import AdapterSpec, ExpertSharing
from xorl.lora.targets import modules_to_save, sites_of, whole_modules


def config_of(
    model: nn.Module,
    spec: AdapterSpec,
    *,
    base: str | None,
    task_type: TaskType | None = "CAUSAL_LM",
    transposed: Collection[str] = (),
    found: Mapping[str, Adapter] | None = None,
    form: ExpertForm | None = None,
) -> AdapterConfig:
    """The adapter_config.json of the adapters in `model`, which were injected with `spec`.

    Targets, ranks and alphas are those of the existing adapters, under the shortest unambiguous names. `transposed` are
    the linear layers whose weight is stored as [in, out] in the base's files; these must be all adapted linear layers,
    or none. `task_type` is None for modules that are no language models. `found` overrides the adapters, for those of a
    bank. `form` is that of adapters on experts; None is SGLang's if they share their outer factors, else per_expert.

    Raises ValueError if there are no adapters, if `spec` describes others, if PEFT or the form cannot express them, or
    if `transposed` names no module.
    """
    check_instance("spec", spec, AdapterSpec)
    if task_type is not None:
        check_choice("task_type", task_type, TaskType)
    if form is not None:
        check_choice("form", form, ExpertForm)
    sites = sites_of(model).values()
    known = {*whole_modules(model), *(name for site in sites for name in site.names)}
    if unknown := sorted(set(transposed) - known):
        raise ValueError(f"transposed: {unknown[0]} is no module of {type(model).__name__}; give full names")
    adapted = adapters(model) if found is None else found
    if not adapted:
        raise ValueError(f"model: {type(model).__name__} has no adapters; call inject(model, spec) first")
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
        targets=shortest_names(found, [name for site in sites for name in site.members or (site.name,)]),
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        # Full names, because PEFT matches `norm` with every name that ends with it, such as `q_norm`.
        modules_to_save=tuple(modules_to_save(spec, model)),
    )
    for name, adapter in found.items():
        if written.scale_of(name) != adapter.scale:
            raise ValueError(f"spec: use_rslora is {spec.use_rslora}, but the adapter on {name} has another scale")
        if (adapter.magnitude_offset is not None) != spec.use_dora:
            raise ValueError(f"spec: use_dora is {spec.use_dora}, but the adapter on {name} was injected otherwise")
        if isinstance(adapter.pair, ExpertLowRank) and adapter.pair.sharing != spec.expert_sharing:
            raise ValueError(
                f"spec: expert_sharing is {spec.expert_sharing!r}, but that of the adapter on {name} is "
                f"{adapter.pair.sharing!r}"
            )
    stack = stack_of(model)
    experts = [
        _expert_factors(each, full_tensor, stack) for each in adapted.values() if isinstance(each.pair, ExpertLowRank)
    ]
    if form is not None and not experts:
        raise ValueError("form: only adapters on experts have forms, and there are none")
    chosen = chosen_form(form, spec.expert_sharing, is_stacked=stack is not None) if experts else "per_expert"
    others = {name: (one.rank, one.alpha) for name, one in adapted.items() if not isinstance(one.pair, ExpertLowRank)}
    return AdapterConfig(
        written,
        None if base is None else str(base),
        task_type,
        fan_in_fan_out=bool(fan_in_fan_out),
        form=chosen,
        form_settings=settings_of(chosen, written, experts, others),
    )


def adapter_tensors(
    model: nn.Module,
    found: Mapping[str, Adapter] | None = None,
    gather: Callable[[Tensor], Tensor] = full_tensor,
    form: ExpertForm | None = None,
    magnitude_of: Callable[[Adapter], Tensor] = magnitude,
) -> list[FileTensors]:
    """The tensors of the adapters in `model`, or of `found` (from a bank), by their names in a file.

    Modules trained whole are not included; `save_adapter` writes them too. `gather` takes a parameter, maybe sharded,
    and returns its whole value; `magnitude_of` takes an adapter and returns DoRA's magnitudes. `form` is that of
    adapters on experts, as for `config_of`.
    """
    if form is not None:
        check_choice("form", form, ExpertForm)
    tensors: list[FileTensors] = []
    experts: list[ExpertFactors] = []
    sharing: ExpertSharing = "none"
    stack = stack_of(model)
    for name, adapter in (adapters(model) if found is None else found).items():
        if isinstance(adapter.pair, ExpertLowRank):
            experts.append(_expert_factors(adapter, gather, stack))
            sharing = adapter.pair.sharing
            continue
        a, b, magnitudes = keys_of(name, "embedding" if adapter.is_embedding else "linear")
        for key, leaf, parameter in ((a, "A", adapter.A), (b, "B", adapter.B)):
            share = adapter.pair.shares.get(leaf)
            shape = tuple(parameter.shape) if share is None else share.whole(parameter.shape)
            tensors.append(FileTensors({key: shape}, partial(_whole, key, parameter, gather)))
        if adapter.magnitude_offset is not None:
            shape = tuple(adapter.magnitude_offset.shape)
            tensors.append(FileTensors({magnitudes: shape}, partial(_named, magnitudes, magnitude_of, adapter)))
    return tensors + expert_tensors(chosen_form(form, sharing, is_stacked=stack is not None), experts)


def _whole(name: str, parameter: Tensor, gather: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {name: gather(parameter).contiguous()}


def stack_of(model: nn.Module) -> ExpertStack | None:
    """How checkpoints of the model stack the experts of a layer; None if they do not."""
    return model.stack if isinstance(model, Decoder) else None


def _expert_factors(adapter: Adapter, gather: Callable[[Tensor], Tensor], stack: ExpertStack | None) -> ExpertFactors:
    """The adapters on one projection of all experts, those of other ranks too."""
    pair = adapter.pair
    assert isinstance(pair, ExpertLowRank)

    def factor(leaf: Leaf) -> ExpertFactor:
        count = 1 if leaf in pair.shared else len(pair.members)
        parameter = pair.factor(leaf)
        shape = (count, parameter.shape[0] // pair.count(leaf), parameter.shape[1])

        def make() -> Tensor:
            whole = gather(parameter).unflatten(0, (count, -1))
            assert tuple(whole.shape) == shape, "gathered over all ranks that hold experts"
            return whole

        return ExpertFactor(shape, make)

    return ExpertFactors(pair.members, pair.rank, pair.alpha, pair.scale, factor("A"), factor("B"), stack)


def _named(name: str, magnitude_of: Callable[[Adapter], Tensor], adapter: Adapter) -> dict[str, Tensor]:
    return {name: magnitude_of(adapter)}


@torch.no_grad()
def load_adapters(model: nn.Module, layout: AdapterLayout, source: WeightSource, *, base_loaded: bool = False) -> None:
    """Load the values of a file, read on every rank, into the adapters in `model`; collective with DoRA.

    The base's weights must be loaded first. Base tensors in the file are not loaded here: `load_adapter` loads all of a
    folder, and `base_loaded` says that the caller has loaded them.

    Raises ValueError as `check_fit` does, if the file has base tensors that nobody has loaded, or if experts share a
    factor of which the file has several values.
    """
    if layout.replaced and not base_loaded:
        raise ValueError(
            f"the file also has tensors of the base, such as {next(iter(layout.replaced))}, which load_adapters leaves "
            "out: use load_adapter, or load them first and pass base_loaded=True"
        )
    check_fit(model, layout)
    for adapter in adapters(model).values():
        _copy_(adapter, "A", layout, source)
        _copy_(adapter, "B", layout, source)
        magnitudes = layout.modules[adapter.members[0]].magnitude
        if magnitudes is not None:
            set_magnitude_(adapter, source.read(magnitudes).float().flatten())


def check_fit(model: nn.Module, layout: AdapterLayout) -> None:
    """Raise ValueError unless the adapters in `model` have the layers, shapes and scales of those in the file."""
    found = adapters(model)
    names = {name for adapter in found.values() for name in adapter.members}
    if names != set(layout.modules):
        differing = sorted(names ^ layout.modules.keys())
        raise ValueError(
            f"the adapters of the model and the file differ: only one of them has {', '.join(differing[:5])}"
        )
    for adapter in found.values():
        expected = (adapter.shape("A"), adapter.shape("B"))
        for name in adapter.members:
            module = layout.modules[name]
            stored = (layout.shapes[module.a], layout.shapes[module.b])
            if expected != stored:
                raise ValueError(
                    f"{name}: A and B are {list(map(list, stored))} in the file, {list(map(list, expected))} in the "
                    "model"
                )
            if (module.magnitude is None) != (adapter.magnitude_offset is None):
                raise ValueError(f"{name}: only one of the file and the model uses DoRA (use_dora)")
            scale = layout.config.spec.scale_of(name)
            if not math.isclose(scale, adapter.scale, rel_tol=1e-6):
                raise ValueError(
                    f"{name}: the adapter's scale is {scale:g} in the file, {adapter.scale:g} in the model: inject the "
                    "alpha and use_rslora of the file (layout.spec)"
                )


def _copy_(adapter: Adapter, leaf: Leaf, layout: AdapterLayout, source: WeightSource) -> None:
    """Copy what this rank holds of A or B."""
    pair = adapter.pair
    if not isinstance(pair, ExpertLowRank):
        whole = source.read(layout.modules[adapter.name].key(leaf))
        for box, part in adapter.place(leaf)[1]:
            part.copy_(box.cut(whole))
    elif leaf not in pair.shared:
        held = [source.read(layout.modules[member].key(leaf)) for member in pair.held_members]
        copy_shard_(pair.factor(leaf), torch.cat(held))
    else:
        copy_shard_(pair.factor(leaf), read_shared(layout, source, pair.members, leaf))
