"""The adapters of a file in another form of adapters on experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from xorl.core.models.recipes import WeightSource
from xorl.core.models.stacks import ExpertStack
from xorl.kernels.arguments import check_choice
from xorl.lora.experts import SHARED
from xorl.lora.linear import Leaf
from xorl.lora.peft.config import AdapterConfig, ExpertForm
from xorl.lora.peft.forms import (
    PARAMETERS,
    ExpertFactor,
    ExpertFactors,
    expert_tensors,
    settings_of,
)
from xorl.lora.peft.layout import ROLES, AdapterLayout, FileTensors, expert_of, read_shared


def in_form(
    layout: AdapterLayout, source: WeightSource, form: ExpertForm, stack: ExpertStack | None = None
) -> tuple[AdapterConfig, list[FileTensors]]:
    """The settings and the tensors of an adapter in `form`, in the dtypes of `source`.

    Args:
        layout, source: as in the form per_expert (`per_expert`).
        stack: how checkpoints of the base stack the experts; None: they do not.

    Raises ValueError, which begins with `form`, if there are no adapters on experts or the form cannot express them.
    """
    check_choice("form", form, ExpertForm)
    members: dict[str, dict[int, str]] = {}
    for name in layout.modules:
        if (found := expert_of(name)) is not None:
            members.setdefault(found[0], {})[found[1]] = name
    if not members:
        raise ValueError("form: only adapters on experts have forms, and there are none")
    # Sorted by layer and, in it, by the rows of the projections: gate, up, down.
    order = list(ROLES)
    stems = sorted(members, key=lambda stem: (stem.rpartition(".")[0], order.index(stem.rpartition(".")[2])))
    numbered = [members[stem] for stem in stems]
    experts = [_factors(layout, source, tuple(of[expert] for expert in sorted(of)), stack) for of in numbered]
    of_experts = {member for each in experts for member in each.members}
    spec = layout.config.spec
    others = {name: (spec.rank_of(name), spec.alpha_of(name)) for name in layout.modules if name not in of_experts}
    config = replace(layout.config, form=form, form_settings=settings_of(form, spec, experts, others))
    taken = {key for name in of_experts for key in (layout.modules[name].a, layout.modules[name].b)}
    kept = [
        FileTensors({key: shape}, partial(_stored, key, source))
        for key, shape in layout.shapes.items()
        if key not in taken
    ]
    return config, kept + expert_tensors(form, experts)


def _stored(key: str, source: WeightSource) -> Mapping[str, Tensor]:
    return {key: source.read(key)}


def _factors(
    layout: AdapterLayout, source: WeightSource, members: tuple[str, ...], stack: ExpertStack | None
) -> ExpertFactors:
    spec, first = layout.config.spec, layout.modules[members[0]]
    role = ROLES[members[0].rpartition(".")[2]]
    shared = SHARED.get((spec.expert_sharing, PARAMETERS[role]), ())

    def factor(leaf: Leaf, shape: tuple[int, int]) -> ExpertFactor:
        def make() -> Tensor:
            if leaf in shared:
                return read_shared(layout, source, members, leaf)[None]
            return torch.stack([source.read(layout.modules[member].key(leaf)) for member in members])

        return ExpertFactor((1 if leaf in shared else len(members), *shape), make)

    return ExpertFactors(
        members,
        spec.rank_of(members[0]),
        spec.alpha_of(members[0]),
        spec.scale_of(members[0]),
        factor("A", (first.rank, first.in_features)),
        factor("B", (first.out_features, first.rank)),
        stack,
    )
