"""The forms in which files hold adapters on experts, and their tensors and settings; `views` reads them.

- `per_expert`: A and B of each expert under the name of its layer, as vLLM and SGLang read them.
- `peft`: PEFT's `target_parameters`, which adapt the stacked parameters gate_up_proj and down_proj of transformers 5.
- `sglang`: SGLang's shared outer form, in which A of gate and up and B of down are one for all experts.

Shapes: E experts, R rank, I input and P output features of a projection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from xorl.core.models.stacks import IN_MEMORY, ExpertStack
from xorl.lora.peft.config import AdapterConfig, ExpertForm, shared_value, shortest_names
from xorl.lora.peft.layout import MEMBER, PREFIX, ROLES, ExpertRole, FileTensors, expert_of
from xorl.lora.spec import AdapterSpec, ExpertSharing, matches_name

SGLANG_NAMES: Mapping[ExpertRole, str] = MappingProxyType({"gate": "w1", "up": "w3", "down": "w2"})
PARAMETERS: Mapping[ExpertRole, str] = MappingProxyType(
    {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
)
# A program that interprets an adapter's files correctly.
Reader: TypeAlias = Literal["peft", "vllm", "sglang"]
_DEFAULTS: Mapping[ExpertSharing, ExpertForm] = MappingProxyType(
    {"none": "per_expert", "outer": "sglang", "all": "per_expert"}
)


@dataclass(frozen=True)
class ExpertFactor:
    """One factor, A [E, R, I] or B [E, P, R]; [1, ...] if the experts share it. `make`: see `FileTensors`."""

    shape: tuple[int, ...]
    make: Callable[[], Tensor]


@dataclass(frozen=True)
class ExpertFactors:
    """The adapters on one projection of the experts of a layer.

    Attributes:
        members: the names of the experts' layers in checkpoints, in the order of the experts.
        stack: how checkpoints stack the experts; None: they do not.
    """

    members: tuple[str, ...]
    rank: int
    alpha: float
    scale: float
    a: ExpertFactor
    b: ExpertFactor
    stack: ExpertStack | None = None

    @property
    def layer(self) -> str:
        """The name of the decoder's layer."""
        return _part(self.members[0], "layer")

    @property
    def role(self) -> ExpertRole:
        """The projection."""
        return ROLES[_part(self.members[0], "leaf")]

    @property
    def experts(self) -> str:
        """The name in checkpoints of the module of the layer's experts."""
        return f"{self.layer}.{_part(self.members[0], 'module')}"

    @property
    def parameter(self) -> str:
        """The name in transformers 5 of the parameter that stacks the projection of all experts."""
        return f"{self.layer}.{module_of(self.stack)}.{PARAMETERS[self.role]}"


def module_of(stack: ExpertStack | None) -> str:
    """The module of experts in transformers 5, below their layer."""
    return (stack or IN_MEMORY).module


def _part(member: str, part: str) -> str:
    found = MEMBER.fullmatch(member)
    assert found is not None, f"{member} is not the layer of an expert"
    return found[part]


def chosen_form(form: ExpertForm | None, sharing: ExpertSharing, *, is_stacked: bool) -> ExpertForm:
    """The form to write: `form`, or, if it is None, SGLang's for shared outer factors and per_expert for others.

    is_stacked: checkpoints stack the experts; SGLang has no form for these.
    """
    if form is not None:
        return form
    return "per_expert" if is_stacked else _DEFAULTS[sharing]


def settings_of(
    form: ExpertForm, spec: AdapterSpec, experts: Sequence[ExpertFactors], others: Mapping[str, tuple[int, float]]
) -> dict[str, object]:
    """What adapter_config.json says beside the settings of `spec`, or instead of them.

    Args:
        spec: describes the adapters as in the form per_expert.
        experts: the adapters on experts.
        others: rank and alpha of the other adapters, by module.

    Raises ValueError, which begins with `form`, if the form cannot express the adapters.
    """
    if not experts:
        return {}
    if form == "sglang":
        if experts[0].stack is not None:
            raise ValueError(
                f"form: SGLang has none for adapters on experts that checkpoints stack, such as {experts[0].experts}: "
                "use peft, or per_expert, which xorl alone reads"
            )
        _require_sglang(spec, experts, others)
        return {"_sglang_lora_format": "shared_outer", "moe_hybrid_shared_lora": True}
    if form == "peft":
        return _settings_of_parameters(spec, experts, others)
    _refuse_if_peft_can(spec, experts, others)
    return {} if spec.expert_sharing == "none" else {"xorl": {"expert_sharing": spec.expert_sharing}}


def readers_of(
    config: AdapterConfig, modules: Collection[str], *, is_mixture: bool, is_stacked: bool = False
) -> tuple[Reader, ...]:
    """The programs that interpret an adapter's files correctly; empty if only xorl does.

    Args:
        config: the configuration of the file, in the file's own form.
        modules: the adapted layers, as in the form per_expert.
        is_mixture: whether the base is a mixture of experts. In a mixture, PEFT treats layers named like the experts'
            projections as stacked experts, even if they are dense.
        is_stacked: whether checkpoints of the base stack the experts of a layer, so that no other program has names for
            each of them.
    """
    if config.form != "per_expert":
        return (config.form,)
    if not is_mixture or not any(expert_of(name) or name.rpartition(".")[2] in ROLES for name in modules):
        return ("peft",)
    if is_stacked:
        return ()
    spec = config.spec
    sizes = {(spec.rank_of(name), spec.alpha_of(name)) for name in modules}
    if len(sizes) > 1 or spec.modules_to_save or spec.use_dora:
        return ()
    return ("vllm",) if spec.use_rslora else ("vllm", "sglang")


def _refuse_if_peft_can(
    spec: AdapterSpec, experts: Sequence[ExpertFactors], others: Mapping[str, tuple[int, float]]
) -> None:
    """Raise ValueError for several ranks or alphas if the form `peft` can hold them; vLLM and SGLang do not read them.

    If it cannot, only xorl can read the adapters in any form, so this form is accepted.
    """
    found = _sizes(experts, others)
    if len(set(found.values())) <= 1:
        return
    try:
        _settings_of_parameters(spec, experts, others)
    except ValueError:
        return
    raise ValueError(f"form: vLLM and SGLang read {_two_sizes(found)}: use peft")


def _require_sglang(
    spec: AdapterSpec, experts: Sequence[ExpertFactors], others: Mapping[str, tuple[int, float]]
) -> None:
    if spec.expert_sharing != "outer":
        raise ValueError(
            "form: SGLang's shared outer form holds adapters that share A of gate and up and B of down between "
            f"experts, but these share {'nothing' if spec.expert_sharing == 'none' else 'all factors'}: use "
            "per_expert, which SGLang reads too"
        )
    if spec.use_rslora:
        raise ValueError("form: SGLang scales adapters by alpha / rank, not by use_rslora: use per_expert or peft")
    found = _sizes(experts, others)
    if len(set(found.values())) > 1:
        raise ValueError(f"form: SGLang reads {_two_sizes(found)}: use peft")


def _sizes(
    experts: Sequence[ExpertFactors], others: Mapping[str, tuple[int, float]]
) -> Mapping[str, tuple[int, float]]:
    """Rank and alpha by layer; one layer stands for all experts of a projection."""
    return {**others, **{each.members[0]: (each.rank, each.alpha) for each in experts}}


def _two_sizes(found: Mapping[str, tuple[int, float]]) -> str:
    one, first = next(iter(found.items()))
    other, second = next(item for item in found.items() if item[1] != first)
    shown = [f"{name} has rank {rank} and alpha {alpha:g}" for name, (rank, alpha) in ((one, first), (other, second))]
    return f"one rank and alpha for all layers, but {' and '.join(shown)}"


def _settings_of_parameters(
    spec: AdapterSpec, experts: Sequence[ExpertFactors], others: Mapping[str, tuple[int, float]]
) -> dict[str, object]:
    """PEFT's settings, and under a key of xorl's own those of `spec` and the ranks of gate and up."""
    taken = [name for name in others if name.rpartition(".")[2] in ROLES]
    if taken:
        raise ValueError(
            f"form: PEFT takes the name of {taken[0]} for that of experts, so it cannot adapt both: use per_expert"
        )
    values = dict(others)
    ranks: dict[str, list[int]] = {}
    for parameter, group in groupby(experts, key=lambda each: each.parameter):
        parts = list(group)
        if len({part.scale for part in parts}) > 1:
            raise ValueError(
                f"form: PEFT has one adapter for gate and up of {parts[0].experts}, but their scales are "
                f"{' and '.join(f'{part.scale:g}' for part in parts)}: give them one rank and alpha, or use per_expert"
            )
        rank = sum(part.rank for part in parts)
        if parts[0].role != "down":
            of_roles = {part.role: part.rank for part in parts}
            ranks[parameter] = [of_roles.get("gate", 0), of_roles.get("up", 0)]
        values[parameter] = rank, parts[0].scale * (math.sqrt(rank) if spec.use_rslora else rank)
    rank, rank_pattern = shared_value({name: rank for name, (rank, _) in values.items()})
    alpha, alpha_pattern = shared_value({name: alpha for name, (_, alpha) in values.items()})
    targets = shortest_names(others, others) if isinstance(spec.targets, str) else spec.targets
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "target_modules": sorted(one for one in targets if any(matches_name(name, one) for name in others)),
        "target_parameters": sorted({each.parameter for each in experts}),
        # PEFT refuses any other dropout for parameters; it does not matter to a trained adapter.
        "lora_dropout": 0.0,
        "xorl": {
            "r": spec.rank,
            "lora_alpha": spec.alpha,
            "rank_pattern": dict(spec.rank_pattern),
            "alpha_pattern": dict(spec.alpha_pattern),
            "target_modules": spec.targets if isinstance(spec.targets, str) else sorted(spec.targets),
            "expert_sharing": spec.expert_sharing,
            "gate_up_ranks": ranks,
        },
    }


def expert_tensors(form: ExpertForm, experts: Iterable[ExpertFactors]) -> list[FileTensors]:
    """The tensors of the adapters on experts, which must be sorted by layer, by their names in a file."""
    if form == "peft":
        layers = [list(group) for _, group in groupby(experts, key=lambda each: each.experts)]
        return [tensors for layer in layers for tensors in _of_parameters(layer)]
    make = _of_stack if form == "sglang" else _of_each
    return [make(each, leaf, factor) for each in experts for leaf, factor in (("lora_A", each.a), ("lora_B", each.b))]


def _of_each(factors: ExpertFactors, leaf: str, factor: ExpertFactor) -> FileTensors:
    """A tensor for each expert; a copy if they share it."""
    names = [f"{PREFIX}{member}.{leaf}.weight" for member in factors.members]

    def make() -> dict[str, Tensor]:
        rows = factor.make().expand(len(names), -1, -1)
        return {name: tensor.contiguous() for name, tensor in zip(names, rows, strict=True)}

    return FileTensors(dict.fromkeys(names, factor.shape[1:]), make)


def _of_stack(factors: ExpertFactors, leaf: str, factor: ExpertFactor) -> FileTensors:
    name = f"{PREFIX}{factors.experts}.{SGLANG_NAMES[factors.role]}.{leaf}.weight"
    return FileTensors({name: factor.shape}, lambda: {name: factor.make().contiguous()})


def _of_parameters(layer: Sequence[ExpertFactors]) -> list[FileTensors]:
    """The tensors of PEFT's wrappers, of which that of down_proj is the outer one if there are two.

    A [E * R, I] has the experts' rows adjacent, and B [P, R * E] has the expert as the fastest index of its columns.
    """
    outer = f"{PREFIX}{layer[0].layer}.{module_of(layer[0].stack)}"
    by_parameter = {
        name: [each for each in layer if PARAMETERS[each.role] == name] for name in ("gate_up_proj", "down_proj")
    }
    is_nested = all(by_parameter.values())
    tensors: list[FileTensors] = []
    for name, parts in by_parameter.items():
        if not parts:
            continue
        prefix = f"{outer}.base_layer" if name == "gate_up_proj" and is_nested else outer
        rank, count = sum(part.rank for part in parts), len(parts[0].members)
        num_outputs = parts[0].b.shape[1] * (2 if name == "gate_up_proj" else 1)
        a, b = f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight"
        tensors.append(FileTensors({a: (count * rank, parts[0].a.shape[2])}, partial(_joined_a, a, parts)))
        tensors.append(FileTensors({b: (num_outputs, rank * count)}, partial(_joined_b, b, parts, num_outputs)))
    return tensors


def _joined_a(name: str, parts: Sequence[ExpertFactors]) -> dict[str, Tensor]:
    count = len(parts[0].members)
    return {name: torch.cat([part.a.make().expand(count, -1, -1) for part in parts], dim=1).flatten(0, 1)}


def _joined_b(name: str, parts: Sequence[ExpertFactors], num_outputs: int) -> dict[str, Tensor]:
    """The B of gate and up are blocks, each on the rows of its own outputs and the columns of its own A."""
    made = [part.b.make() for part in parts]
    joined = made[0].new_zeros(len(parts[0].members), num_outputs, sum(part.rank for part in parts))
    column = 0
    for part, b in zip(parts, made, strict=True):
        outputs = outputs_of(part.role, num_outputs, part.stack)
        joined[:, outputs, column : column + part.rank] = b
        column += part.rank
    return {name: joined.permute(1, 2, 0).flatten(1)}


def outputs_of(role: ExpertRole, num_outputs: int, stack: ExpertStack | None) -> slice:
    """The outputs of a projection among the `num_outputs` of the parameter of transformers 5 that stacks it."""
    if role == "down":
        return slice(0, num_outputs)
    index, half = (1 if role == "up" else 0), num_outputs // 2
    return slice(index, None, 2) if stack is not None and stack.alternates else slice(index * half, (index + 1) * half)
