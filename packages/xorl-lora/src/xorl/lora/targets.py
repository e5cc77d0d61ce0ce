"""The layers of a model that can have adapters, under their names in checkpoints.

xorl's decoder stacks several layers of a checkpoint in one (`qkv_proj` is q_proj, k_proj and v_proj); each of them is a
separate site here. In any other model, each layer is a site.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from xorl.core.models import Decoder
from xorl.core.models.image_encoder import PatchLinear
from xorl.core.models.recipes import ENCODER, LogicalModule
from xorl.core.nn import Embedding, Linear
from xorl.core.nn.moe import ExpertLinear, Router
from xorl.kernels.torch_private import has_hooks
from xorl.lora.arguments import check_instance
from xorl.lora.spec import AdapterSpec, matches_name

# Characters that occur in regular expressions and not in the names of modules.
_EXPRESSION = re.compile(r"[][*+?^$(){}|\\]")
# The name parts that torch.compile, activation checkpointing and FSDP add for the modules that they wrap.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True)
class Site:
    """A layer that can be adapted: a whole module, a layer that a module stacks, or one projection of all experts.

    Attributes:
        name: the layer's name in a checkpoint, which targets refer to.
        path: the full name of the module that computes it.
        start, stop: its range in the output features of that module; of experts, in those of one expert.
        is_linear: whether it is a linear layer; an embedding otherwise.
        is_head: whether it computes the logits of xorl's decoder, or a module names it as its output embeddings.
        refusal: why it cannot have an adapter, or None.
        members: for a projection of experts, the names in a checkpoint of the experts' layers; `name` is theirs without
            the number of the expert.
    """

    name: str
    path: str
    start: int
    stop: int
    is_linear: bool
    is_head: bool
    refusal: str | None
    members: tuple[str, ...] = ()

    @property
    def is_encoder(self) -> bool:
        """Whether it belongs to the image encoder of xorl's decoder, whose name in checkpoints is another one."""
        return self.path.startswith(ENCODER) and not self.name.startswith(ENCODER)

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which patterns may refer to it."""
        return (self.name, *self.members)


def sites_of(model: nn.Module) -> dict[str, Site]:
    """Every linear layer, embedding and projection of experts by its name in checkpoints, in module order."""
    sites: dict[str, Site] = {}
    heads = _output_embeddings(model)
    for parent_path, parent in model.named_modules():
        for child_name, module in parent.named_children():
            if isinstance(module, ExpertLinear) and isinstance(model, Decoder):
                sites |= _expert_sites(model, f"{parent_path}.{child_name}", module)
            if not isinstance(module, (nn.Linear, Linear, nn.Embedding, Embedding)):
                continue
            path = f"{parent_path}.{child_name}".removeprefix(".")
            refusal = _refusal(model, parent, module)
            is_linear = isinstance(module, (nn.Linear, Linear))
            start = 0
            for part in _parts(model, path, module):
                sites[part.name] = Site(
                    part.name,
                    path,
                    start,
                    start + (part.num_rows if is_linear else module.weight.shape[1]),
                    is_linear=is_linear,
                    is_head=module in heads,
                    refusal=refusal if part.is_whole else f"{path} contains only a part of it: set merge_qkv=True",
                )
                start += part.num_rows
    return sites


def _output_embeddings(model: nn.Module) -> set[nn.Module]:
    """The heads of language models in `model`: that of xorl's decoder, and what `get_output_embeddings` returns."""
    heads: set[nn.Module] = set()
    if isinstance(model, Decoder) and model.lm_head is not None:
        heads.add(model.lm_head)
    for module in model.modules():
        # A method of language models of transformers; None for those without a head.
        find = getattr(module, "get_output_embeddings", None)
        if callable(find) and isinstance(head := find(), nn.Module):
            heads.add(head)
    return heads


def _expert_sites(model: Decoder, path: str, module: ExpertLinear) -> dict[str, Site]:
    layers = model.logical[path]
    num_projections = _num_projections([layer.name for layer in layers])
    num_experts = len(layers) // num_projections
    sites: dict[str, Site] = {}
    start = 0
    for projection in layers[:num_projections]:
        index = len(sites)
        members = tuple(layers[expert * num_projections + index].name for expert in range(num_experts))
        # The number of the expert is the part of the name that is a number and not that of the layer.
        parts = projection.name.split(".")
        number = max(at for at, part in enumerate(parts) if part.isdigit())
        name = ".".join(parts[:number] + parts[number + 1 :])
        stop = start + projection.num_rows
        sites[name] = Site(name, path, start, stop, is_linear=True, is_head=False, refusal=None, members=members)
        start = stop
    return sites


def _num_projections(names: Sequence[str]) -> int:
    """How many of the layers, which are in the order of the experts, belong to one expert."""
    return len({name.rpartition(".")[2] for name in names})


def resolve(spec: AdapterSpec, model: nn.Module) -> tuple[Site, ...]:
    """The sites of `model` that get an adapter, in module order.

    "all-linear" selects every linear layer that supports an adapter, except experts, the head of a language model and
    an image encoder, which must be named (layers of an encoder by their names in checkpoints). It skips
    layers whose weight another module uses (a tied head), subclasses of nn.Linear (which may compute something else),
    and layers inside torch's attention and encoder layers (which read the weight without calling the layer). The name
    of a layer that stacks several selects all of them.

    Raises ValueError for a name that matches nothing, listing the existing names; for a named layer that does not
    support an adapter; if no layer is left to adapt; for a layer with hooks, which is replaced; and for a model that is
    itself a layer.
    """
    check_instance("spec", spec, AdapterSpec)
    if isinstance(model, (nn.Linear, Linear, nn.Embedding, Embedding)):
        raise ValueError(
            f"model: it is itself a {type(model).__name__}, which cannot be replaced in place: put it in a module, "
            "such as nn.Sequential(layer)"
        )
    sites = sites_of(model)
    if spec.targets == "all-linear":
        found = [
            site
            for site in sites.values()
            if site.is_linear and not site.is_head and not site.members and not site.is_encoder and site.refusal is None
        ]
        if not found:
            refused = [f"{site.name} ({site.refusal})" for site in sites.values() if site.refusal is not None]
            raise ValueError(
                f"targets 'all-linear' finds no linear layer to adapt in {type(model).__name__}: "
                f"{'; '.join([*refused, *_unsupported(model, None)][:5]) or 'it has none'}"
            )
    else:
        found = _named(sites, spec.targets, model)
    if spec.expert_sharing != "none" and not any(site.members for site in found):
        raise ValueError(
            "expert_sharing: the targets name no layer of experts, which could share factors: add some, such as "
            "gate_proj, or share nothing"
        )
    for site in found:
        layer = model.get_submodule(site.path)
        if isinstance(layer, (nn.Linear, nn.Embedding)) and has_hooks(layer):
            raise ValueError(
                f"targets: {site.name} has hooks, which are lost when a layer with adapters takes its place; remove "
                "them, and register them again afterwards"
            )
    spec.check_patterns([name for site in found for name in site.names])
    embedded = [site.name for site in found if not site.is_linear]
    if spec.use_dora and embedded:
        raise ValueError(f"use_dora supports only linear layers, but targets name embeddings: {', '.join(embedded)}")
    if spec.use_dora and (experts := [site.name for site in found if site.members]):
        raise ValueError(
            f"use_dora needs the norms of the adapted rows in every step, which would merge each expert: targets name "
            f"{experts[0]}; leave out the experts, or use_dora"
        )
    return tuple(found)


def _named(sites: dict[str, Site], targets: Sequence[str], model: nn.Module) -> list[Site]:
    def matches(site: Site, target: str) -> bool:
        # Layers of an encoder have other names in checkpoints than those of the decoder that compute the same.
        path = site.name if site.is_encoder else without_wrappers(site.path)
        names = (site.name, path, *site.members)
        return any(matches_name(name, target) for name in names)

    unmatched = [target for target in targets if not any(matches(site, target) for site in sites.values())]
    if unmatched:
        known = sorted({site.name.rpartition(".")[2] for site in sites.values()})
        reasons = [reason for target in unmatched for reason in _unsupported(model, target)]
        hints = list(dict.fromkeys(hint for target in unmatched if (hint := _hint(target, sites, model)) is not None))
        raise ValueError(
            f"targets {unmatched} match no layer of {type(model).__name__}; its layers are named {known}"
            + f" ({'; '.join(reasons[:3])}: only nn.Linear and nn.Embedding can be adapted)" * bool(reasons)
            + "".join(f". {hint}" for hint in hints[:3])
        )
    found = [site for site in sites.values() if any(matches(site, target) for target in targets)]
    for site in found:
        left_out = [one for one in site.members if not any(_selects(target, site, one) for target in targets)]
        if left_out:
            raise ValueError(f"targets name some of the experts only: all of a layer are adapted, also {left_out[0]}")
    blocked = [f"{site.name} ({site.refusal})" for site in found if site.refusal is not None]
    if blocked:
        raise ValueError(f"targets {list(targets)} name layers that cannot be adapted: {'; '.join(blocked[:5])}")
    return found


def _hint(target: str, sites: dict[str, Site], model: nn.Module) -> str | None:
    """What to write in place of a target that matches no layer; None if that cannot be told."""
    if target.lower().replace("_", "-") in {"all", "*", "all-linear"}:
        return "For every linear layer but the head and experts, write all-linear, which is not in a list"
    routers = (name for name, module in model.named_modules() if isinstance(module, Router))
    if any(matches_name(without_wrappers(name), target) for name in routers):
        return "Routers have no adapter: leave them out, or train them whole with modules_to_save"
    if not _EXPRESSION.search(target):
        return None
    try:
        expression = re.compile(target)
    except re.error:
        return "Targets are names of layers, not regular expressions"
    names = [name for site in sites.values() for name in site.names if expression.search(name)]
    found = sorted({name.rpartition(".")[2] for name in names})
    return "Targets are names of layers, not regular expressions" + f": write [{', '.join(found)}]" * bool(found)


def _unsupported(model: nn.Module, target: str | None) -> list[str]:
    """Why no adapter can be on the matrices of other modules than sites, such as Conv1D or experts in one parameter.

    target: the name of such a module or parameter; None for all.
    """
    reasons: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, Linear, nn.Embedding, Embedding, Router)):
            continue
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            if parameter.dim() > 1 and (target is None or any(matches_name(one, target) for one in (path, name))):
                reasons.append(f"{name} {list(parameter.shape)} is a parameter of {type(module).__name__}")
    return reasons


def _selects(target: str, site: Site, member: str) -> bool:
    return any(matches_name(name, target) for name in (site.name, without_wrappers(site.path), member))


def modules_to_save(spec: AdapterSpec, model: nn.Module) -> dict[str, nn.Module]:
    """The modules of `model` that are trained whole, by their names in checkpoints.

    Raises ValueError for a name that matches no module with parameters, or one that cannot be trained separately.
    """
    if not spec.modules_to_save:
        return {}
    owners = _owners(model)
    parts = {part.name: (name, part) for name, module in owners.items() for part in _parts(model, name, module)}
    saved: dict[str, nn.Module] = {}
    for target in spec.modules_to_save:
        found = {name: path for name, (path, _) in parts.items() if matches_name(name, target)}
        if not found:
            known = sorted({name.rpartition(".")[2] for name in parts if name})
            if isinstance(model, Decoder) and matches_name("lm_head", target):
                raise ValueError(f"modules_to_save: {target} is tied to the embedding and cannot be trained separately")
            raise ValueError(f"modules_to_save: {target!r} matches no module of {type(model).__name__}; it has {known}")
        for name, path in found.items():
            if sum(other == path for other, _ in parts.values()) > 1 or not parts[name][1].is_whole:
                raise ValueError(f"modules_to_save: {name} shares {path} with other modules; use an adapter instead")
            if _is_tied(model, owners[path]):
                raise ValueError(
                    f"modules_to_save: {name} shares its weight with the head or another module, as with "
                    "tie_word_embeddings, and cannot be trained alone; leave it out"
                )
            if not all(parameter.is_floating_point() for parameter in owners[path].parameters()):
                raise ValueError(
                    f"modules_to_save: {name} is quantised and cannot be trained; exclude it from quantize_"
                )
            saved[name] = owners[path]
    return saved


def whole_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with parameters by their names in checkpoints, except those that share a module with others."""
    parts = {path: (module, _parts(model, path, module)) for path, module in _owners(model).items()}
    return {found[0].name: module for module, found in parts.values() if len(found) == 1 and found[0].is_whole}


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if any(True for _ in module.parameters())}


def _is_tied(model: nn.Module, module: nn.Module) -> bool:
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    if isinstance(model, Decoder) and model.lm_head is None and module is model.model.embed_tokens:
        return True
    return any(uses[id(parameter)] > 1 for parameter in module.parameters())


def without_wrappers(path: str) -> str:
    """A module's full name without the parts that wrappers add."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def _parts(model: nn.Module, path: str, module: nn.Module) -> Sequence[LogicalModule]:
    if isinstance(model, Decoder):
        return model.logical.get(path, ())
    return (LogicalModule(without_wrappers(path), _num_outputs(module), is_whole=True),)


def _num_outputs(module: nn.Module) -> int:
    if isinstance(module, (nn.Linear, Linear)):
        return module.out_features
    return module.weight.shape[1] if isinstance(module, (nn.Embedding, Embedding)) else 0


def _refusal(model: nn.Module, parent: nn.Module, module: nn.Module) -> str | None:
    if isinstance(module, (nn.Linear, nn.Embedding)) and type(module) not in (nn.Linear, nn.Embedding):
        return f"it is a {type(module).__name__}, not a plain nn.Linear or nn.Embedding"
    if isinstance(parent, nn.TransformerEncoderLayer):
        return "nn.TransformerEncoderLayer reads its weight in inference without calling it"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return "embeddings with max_norm or sparse gradients are not supported"
    if isinstance(module, PatchLinear):
        return "it is a convolution in checkpoints, which adapters of linear layers do not fit"
    if _is_tied(model, module):
        return "another module or the head shares its weight, and merging would change both"
    return None
