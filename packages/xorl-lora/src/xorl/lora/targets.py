"""The layers of a model that can have adapters, under their names in checkpoints.

xorl's decoder stacks several layers of a checkpoint in one (`qkv_proj` is q_proj, k_proj and v_proj); each of them is a
separate site here. In any other model, each layer is a site.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from xorl.core.models import Decoder
from xorl.core.models.recipes import LogicalModule
from xorl.core.nn import Embedding, Linear
from xorl.lora.spec import AdapterSpec, matches_name

# The name parts that torch.compile, activation checkpointing and FSDP add for the modules that they wrap.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True)
class Site:
    """A layer that can be adapted: a whole module, or one of the layers that a module stacks.

    Attributes:
        name: the layer's name in a checkpoint, which targets refer to.
        path: the full name of the module that computes it.
        start, stop: its range in the output features of that module.
        is_linear: whether it is a linear layer; an embedding otherwise.
        is_head: whether it computes the logits of xorl's decoder.
        refusal: why it cannot have an adapter, or None.
    """

    name: str
    path: str
    start: int
    stop: int
    is_linear: bool
    is_head: bool
    refusal: str | None


def sites_of(model: nn.Module) -> dict[str, Site]:
    """Every linear layer and embedding of `model` by its name in checkpoints, in module order."""
    sites: dict[str, Site] = {}
    for parent_path, parent in model.named_modules():
        for child_name, module in parent.named_children():
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
                    is_head=isinstance(model, Decoder) and module is model.lm_head,
                    refusal=refusal if part.is_whole else f"{path} contains only a part of it: set merge_qkv=True",
                )
                start += part.num_rows
    return sites


def resolve(spec: AdapterSpec, model: nn.Module) -> tuple[Site, ...]:
    """The sites of `model` that get an adapter, in module order.

    "all-linear" selects every linear layer that supports an adapter, including the output head, except that of xorl's
    decoder. It skips layers whose weight another module uses (a tied head), subclasses of nn.Linear (which may compute
    something else), and layers inside torch's attention and encoder layers (which read the weight without calling the
    layer). The name of a layer that stacks several selects all of them.

    Raises ValueError for a name that matches nothing, listing the existing names; for a named layer that does not
    support an adapter; and if no layer is left to adapt.
    """
    sites = sites_of(model)
    if spec.targets == "all-linear":
        found = [site for site in sites.values() if site.is_linear and not site.is_head and site.refusal is None]
        if not found:
            refused = [f"{site.name} ({site.refusal})" for site in sites.values() if site.refusal is not None]
            raise ValueError(
                f"targets 'all-linear' finds no linear layer to adapt in {type(model).__name__}: "
                f"{'; '.join(refused[:5]) or 'it has none'}"
            )
    else:
        found = _named(sites, spec.targets, model)
    spec.check_patterns([site.name for site in found])
    embedded = [site.name for site in found if not site.is_linear]
    if spec.use_dora and embedded:
        raise ValueError(f"use_dora supports only linear layers, but targets name embeddings: {', '.join(embedded)}")
    return tuple(found)


def _named(sites: dict[str, Site], targets: Sequence[str], model: nn.Module) -> list[Site]:
    def matches(site: Site, target: str) -> bool:
        return matches_name(site.name, target) or matches_name(without_wrappers(site.path), target)

    unmatched = [target for target in targets if not any(matches(site, target) for site in sites.values())]
    if unmatched:
        known = sorted({site.name.rpartition(".")[2] for site in sites.values()})
        raise ValueError(f"targets {unmatched} match no layer of {type(model).__name__}; its layers are named {known}")
    found = [site for site in sites.values() if any(matches(site, target) for target in targets)]
    blocked = [f"{site.name} ({site.refusal})" for site in found if site.refusal is not None]
    if blocked:
        raise ValueError(f"targets {list(targets)} name layers that cannot be adapted: {'; '.join(blocked[:5])}")
    return found


def modules_to_save(spec: AdapterSpec, model: nn.Module) -> dict[str, nn.Module]:
    """The modules of `model` that are trained whole, by their names in checkpoints.

    Raises ValueError for a name that matches no module with parameters, or one that cannot be trained separately.
    """
    if not spec.modules_to_save:
        return {}
    owners = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters())}
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
                raise ValueError(f"modules_to_save: {name} shares its weight with the head or another module")
            saved[name] = owners[path]
    return saved


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
    if _is_tied(model, module):
        return "another module or the head shares its weight, and merging would change both"
    return None
