"""Adds adapters to a module, and reads and loads their parameters by checkpoint names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, zip_longest

import torch
from torch import Tensor, nn

from xorl.core.models.initial import fill_normal_, fill_uniform_, key_of
from xorl.core.nn import Embedding, Linear
from xorl.core.nn.moe import ExpertLinear, Experts, MixtureOfExperts
from xorl.core.nn.share import Share, pieces
from xorl.core.shards import Box, copy_shard_
from xorl.lora.arguments import check_instance, check_integer
from xorl.lora.bank_layer import belongs_to_bank
from xorl.lora.experts import ExpertLowRank, ExpertsAdapter, SharedFactors
from xorl.lora.linear import (
    EmbeddingAdapter,
    Leaf,
    LinearAdapter,
    LowRank,
    TorchEmbedding,
    TorchLinear,
    adapter_of,
    initial_bound,
    torch_embedding,
    torch_linear,
)
from xorl.lora.quantized import share_of
from xorl.lora.spec import AdapterSpec
from xorl.lora.targets import Site, modules_to_save, resolve, without_wrappers


@dataclass(frozen=True)
class Adapter:
    """One adapter in a model.

    Attributes:
        name: the adapted layer's name in a checkpoint. A module that stacks several layers has an adapter for each.
        pair: its parameters; DTensors if the model is sharded.
        layer: the adapted module; the adapter covers its output features [pair.start, pair.stop); of experts, those of
            each expert.
        path: the full name of that module, without wrappers.
    """

    name: str
    pair: LowRank
    layer: Linear | Embedding | ExpertLinear
    path: str

    @property
    def A(self) -> nn.Parameter:
        """[rank, input features]; for an embedding, [rank, rows]; for experts, see ExpertLowRank."""
        return self.pair.factor("A")

    @property
    def B(self) -> nn.Parameter:
        """[output features, rank]; for experts, see ExpertLowRank."""
        return self.pair.factor("B")

    @property
    def magnitude_offset(self) -> nn.Parameter | None:
        """[output features], only with DoRA: see LowRank and `xorl.lora.merge.magnitude`."""
        return self.pair.magnitude_offset

    @property
    def rank(self) -> int:
        """The rank of B @ A."""
        return self.pair.rank

    @property
    def alpha(self) -> float:
        """The numerator of the scale."""
        return self.pair.alpha

    @property
    def scale(self) -> float:
        """The factor of B @ A."""
        return self.pair.scale

    @property
    def is_embedding(self) -> bool:
        """Whether it adapts an embedding."""
        return isinstance(self.layer, Embedding)

    @property
    def members(self) -> tuple[str, ...]:
        """The names of all layers that it adapts: of each expert, or its own."""
        return self.pair.members if isinstance(self.pair, ExpertLowRank) else (self.name,)

    def place(self, leaf: Leaf) -> tuple[tuple[int, ...], list[tuple[Box, Tensor]]]:
        """The shape of A or B on all ranks together, and this rank's `pieces` of it."""
        parameter = self.pair.factor(leaf)
        share = self.pair.shares.get(leaf)
        whole = tuple(parameter.shape) if share is None else share.whole(parameter.shape)
        return whole, pieces(parameter, share)

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape of A or B of one layer, on all ranks together."""
        if isinstance(self.pair, ExpertLowRank):
            factor = self.pair.factor(leaf)
            return (factor.shape[0] // self.pair.count(leaf), *factor.shape[1:])
        return self.place(leaf)[0]

    @property
    def zero(self) -> Leaf:
        """The factor that starts at zero, so that the model's outputs do not change: B, or A of an embedding."""
        return "A" if self.is_embedding else "B"

    def parameters(self) -> dict[str, nn.Parameter]:
        """Its parameters by the suffixes of their names in state dicts."""
        found = {"lora_A": self.A, "lora_B": self.B}
        return found if self.magnitude_offset is None else found | {"lora_magnitude_offset": self.magnitude_offset}


def inject(model: nn.Module, spec: AdapterSpec, *, seed: int = 0) -> tuple[str, ...]:
    """Add an adapter to each layer that `spec` targets, in place, and freeze all parameters that `spec` does not train.

    The model's outputs do not change. nn.Linear and nn.Embedding are replaced by layers with the same parameters that
    support adapters; layers of xorl's decoder support them already. Adapters are initialised, except on the meta
    device: call `init_adapters` there once they have memory.

    Returns:
        The names of the adapted layers in checkpoints.

    Raises ValueError, before anything is changed, if a target does not fit, if `model` already has adapters or belongs
    to a bank, and for a seed that is no integer.
    """
    check_instance("spec", spec, AdapterSpec)
    check_integer("seed", seed)
    if belongs_to_bank(model):
        raise ValueError(f"{type(model).__name__} belongs to a bank: add adapters to it with AdapterBank.add")
    if adapters(model):
        raise ValueError(f"{type(model).__name__} already has adapters; fold them in with merge_(model) first")
    sites = resolve(spec, model)
    saved = modules_to_save(spec, model)
    if both := sorted(saved.keys() & {site.name for site in sites}):
        raise ValueError(f"modules_to_save: {', '.join(both)} is also an adapter target; choose one of the two")
    model.requires_grad_(False)
    # The projections of a layer's experts share one adapter module, because one kernel computes them.
    for (owner, path), group in groupby(sites, key=lambda site: (_owner(site), None if site.members else site.path)):
        if path is None:
            _adapt_experts_(model, owner, list(group), spec)
        else:
            _adapt_(model, path, list(group), spec)
    for module in saved.values():
        module.requires_grad_(True)
    if not any(adapter.A.is_meta for adapter in adapters(model).values()):
        init_adapters(model, seed=seed)
    return tuple(site.name for site in sites)


def remove_(model: nn.Module) -> None:
    """Remove all adapters, in place: undoes `inject`, but what it has frozen stays frozen."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, Experts):
            layer.adapter = None
        if isinstance(layer, MixtureOfExperts):
            layer.shared_factors = None
        if isinstance(layer, (Linear, Embedding)) and layer.adapter is not None:
            layer.adapter = None
            if isinstance(layer, TorchLinear):
                model.set_submodule(path, torch_linear(layer, layer.weight))
            elif isinstance(layer, TorchEmbedding):
                model.set_submodule(path, torch_embedding(layer))


def _owner(site: Site) -> str:
    return site.path.rpartition(".")[0]


def _adapt_experts_(model: nn.Module, path: str, sites: list[Site], spec: AdapterSpec) -> None:
    experts = model.get_submodule(path)
    assert isinstance(experts, Experts)
    if experts.gate.num_parts == 1:
        raise ValueError(
            f"targets: {sites[0].name}: adapters on experts without a gate are not supported; name projections of "
            "other layers, such as in_proj"
        )
    pairs = [new_expert_pair(site, spec, model, experts.down_proj.weight.device) for site in sites]
    experts.adapter = ExpertsAdapter(pairs, spec.dropout, experts).train(experts.training)
    if spec.expert_sharing != "none":
        mixture = model.get_submodule(path.rpartition(".")[0])
        assert isinstance(mixture, MixtureOfExperts)
        mixture.shared_factors = SharedFactors(pairs)


def _adapt_(model: nn.Module, path: str, sites: list[Site], spec: AdapterSpec) -> None:
    layer = model.get_submodule(path)
    if isinstance(layer, nn.Linear):
        layer = TorchLinear(layer)
        model.set_submodule(path, layer)
    elif isinstance(layer, nn.Embedding):
        layer = TorchEmbedding(layer)
        model.set_submodule(path, layer)
    assert isinstance(layer, (Linear, Embedding))
    in_features = layer.in_features if isinstance(layer, Linear) else len(layer.held)
    share = share_of(layer)
    pairs = [new_pair(site, spec, in_features, next(layer.parameters()).device, share) for site in sites]
    if isinstance(layer, Linear):
        layer.adapter = LinearAdapter(pairs, spec.dropout)
    else:
        layer.adapter = EmbeddingAdapter(pairs, spec.dropout)
    layer.adapter.train(layer.training)


def new_pair(
    site: Site, spec: AdapterSpec, in_features: int, device: torch.device, share: Share | None = None
) -> LowRank:
    """The uninitialised parameters of the adapter of `spec` on `site`; share: what the layer holds of its weight."""
    part, shares = (site.start, site.stop), {}
    if share is not None:
        part, shares = _held_part(site, spec.rank_of(site.name), share)
    pair = LowRank(
        site.name,
        rank=spec.rank_of(site.name),
        alpha=spec.alpha_of(site.name),
        scale=spec.scale_of(site.name),
        part=part,
        in_features=in_features,
        use_dora=spec.use_dora,
        device=device,
    )
    pair.shares = shares
    return pair


def _held_part(site: Site, rank: int, share: Share) -> tuple[tuple[int, int], dict[str, Share]]:
    """The output features of a layer that the adapter on `site` covers, and what the layer's module holds of A and B.

    The factor on the side of the weight that ranks do not divide is whole on every rank.
    """
    axes = share.divided_over
    if not site.is_linear:  # A has a column for each row of the weight
        [rows] = share.rows
        return (site.start, site.stop), {"A": Share(rank, ((0, rank),), axes, rows, share.num_rows)}
    if share.columns is not None:
        return (site.start, site.stop), {"A": Share(rank, ((0, rank),), axes, share.columns, share.num_columns)}
    ranges: list[tuple[int, int]] = []
    copies: list[tuple[int, int]] = []
    first, taken = 0, 0
    for (start, stop), own in zip_longest(share.rows, share.copies, fillvalue=(1, 0)):
        begin, end = max(start, site.start), min(stop, site.stop)
        if begin < end:
            first = first if ranges else taken + begin - start
            ranges.append((begin - site.start, end - site.start))
            copies.append(own)
        taken += stop - start
    num_rows = sum(stop - start for start, stop in ranges)
    return (first, first + num_rows), {
        "B": Share(site.stop - site.start, tuple(ranges), axes, copies=tuple(copies) if share.copies else ())
    }


def new_expert_pair(site: Site, spec: AdapterSpec, model: nn.Module, device: torch.device) -> ExpertLowRank:
    """The uninitialised parameters of the adapters of `spec` on a projection of the experts that this rank holds."""
    path, _, projection = site.path.rpartition(".")
    layer, mixture = model.get_submodule(site.path), model.get_submodule(path.rpartition(".")[0])
    assert isinstance(layer, ExpertLinear)
    assert isinstance(mixture, MixtureOfExperts)
    return ExpertLowRank(
        site.name,
        members=site.members,
        projection=projection,
        layer=layer,
        rank=spec.rank_of(*site.names),
        alpha=spec.alpha_of(*site.names),
        scale=spec.scale_of(*site.names),
        part=(site.start, site.stop),
        num_active=mixture.num_active,
        sharing=spec.expert_sharing,
        device=device,
    )


@torch.no_grad()
def init_adapters(model: nn.Module, *, seed: int, generation: int = 0) -> None:
    """Initialise every adapter, sharded or whole; the model's outputs do not change.

    A is uniform in +-1/sqrt(I) and B is zero; for an embedding, A is zero and B normal. Values depend only on the
    seed, the generation (the number of earlier initialisations), the layer's name, the shape and the index: not on
    ranks, devices, other adapters or torch's global generator.

    Raises ValueError for a seed that is no integer.
    """
    check_integer("seed", seed)
    suffix = f"/{generation}" if generation else ""
    for adapter in adapters(model).values():
        drawn: Leaf = "A" if adapter.zero == "B" else "B"
        shape, held = adapter.place(drawn)
        key = key_of(seed, f"{adapter.name}.lora_{drawn}{suffix}", shape)
        for box, part in held:
            if adapter.is_embedding:
                fill_normal_(part, std=1.0, key=key, shape=shape, offset=box.offset)
            else:
                fill_uniform_(part, bound=initial_bound(shape[1]), key=key, shape=shape, offset=box.offset)
        adapter.pair.factor(adapter.zero).zero_()
        if adapter.magnitude_offset is not None:
            adapter.magnitude_offset.zero_()


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within this context, the model computes what its base does.

    Adapters are detached, not merged, and attached again on exit; meanwhile `named_parameters` does not list theirs.
    """
    layers = [each for each in model.modules() if isinstance(each, (Linear, Embedding, Experts)) and each.adapter]
    kept = [layer.adapter for layer in layers]
    for layer in layers:
        layer.adapter = None
    try:
        yield
    finally:
        for layer, adapter in zip(layers, kept, strict=True):
            layer.adapter = adapter  # pyright: ignore[reportAttributeAccessIssue]


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """The adapters in `model` by the names of the adapted layers in checkpoints, in module order."""
    found: dict[str, Adapter] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, Experts) and isinstance(layer.adapter, ExpertsAdapter):
            for pair in layer.adapter.pairs():
                projection = layer.get_submodule(pair.projection)
                assert isinstance(projection, ExpertLinear)
                of_projection = f"{without_wrappers(path)}.{pair.projection}"
                found[pair.name] = Adapter(pair.name, pair, projection, of_projection)
        elif isinstance(layer, (Linear, Embedding)) and (adapter := adapter_of(layer)) is not None:
            for pair in adapter.pairs():
                found[pair.name] = Adapter(pair.name, pair, layer, without_wrappers(path))
    return found


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of all adapters by name (`{layer}.lora_A` and so on); wrappers do not change the names.

    Parameters trained by `modules_to_save` are not included: they belong to the model itself.
    """
    return {
        f"{name}.{leaf}": parameter
        for name, adapter in adapters(model).items()
        for leaf, parameter in adapter.parameters().items()
    }


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of `model` without its adapters, under their own names."""
    adapter_ids = {id(parameter) for parameter in adapter_parameters(model).values()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in adapter_ids}


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The values of `adapter_parameters`, detached and not copied: DTensors in a sharded model.

    The scale is part of the spec and not included.
    """
    return {name: parameter.detach() for name, parameter in adapter_parameters(model).items()}


def load_adapter_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy `state`, which has whole tensors, into the adapters of `model`, which may be sharded.

    Raises ValueError, before anything is copied, unless names and shapes match those of `adapter_parameters`, and
    for values that are not of floating point.
    """
    parameters = adapter_parameters(model)
    problems = [f"{name} is missing" for name in parameters.keys() - state.keys()]
    problems += [f"{name} is not in the model" for name in state.keys() - parameters.keys()]
    problems += [
        f"{name} has shape {list(state[name].shape)}, the model has {list(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in state and state[name].shape != parameter.shape
    ]
    problems += [
        f"{name} is {state[name].dtype}, not of floating point"
        for name in parameters
        if name in state and not state[name].is_floating_point()
    ]
    if problems:
        raise ValueError(
            f"the state does not fit the model's adapters ({len(problems)} problems): {'; '.join(sorted(problems)[:5])}"
        )
    for name, parameter in parameters.items():
        copy_shard_(parameter, state[name])
