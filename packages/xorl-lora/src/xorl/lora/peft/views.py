"""Reads adapters on experts of any form as in the form per_expert: a pair of tensors for each expert.

Shapes: E experts, R rank, I input and P output features of a projection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from xorl.core.models.recipes import WeightSource
from xorl.core.models.stacks import IN_MEMORY, ExpertNames
from xorl.lora.peft.config import AdapterConfig, gate_up_ranks
from xorl.lora.peft.forms import PARAMETERS, SGLANG_NAMES, outputs_of
from xorl.lora.peft.layout import PREFIX, ROLES, ExpertRole
from xorl.lora.spec import ExpertSharing, ValueT, matches_name

# Of families whose names in checkpoints are those of transformers 5.
_NAMES = ExpertNames("mlp.gate", "mlp.experts.{}", "gate_proj", "up_proj", "down_proj")
_STACK = re.compile(
    re.escape(PREFIX) + rf"(?P<experts>.+\.experts)\.(?P<name>{'|'.join(ROLES)})\.lora_(?P<leaf>[AB])\.weight"
)


class _Cut(Protocol):
    """A tensor of the form per_expert as a part of the tensor `key` of the file."""

    @property
    def key(self) -> str: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    def read(self, source: WeightSource, whole: Callable[[str], Tensor]) -> Tensor:
        """The part. `whole` reads a tensor, and keeps it for the next parts of it."""
        ...


@dataclass(frozen=True)
class _Rows:
    """The rows from `start` on of a matrix."""

    key: str
    shape: tuple[int, int]
    start: int

    def read(self, source: WeightSource, whole: Callable[[str], Tensor]) -> Tensor:
        return source.read(self.key, self.start, self.start + self.shape[0])


@dataclass(frozen=True)
class _Matrix:
    """One matrix of a stack [E, ...]."""

    key: str
    shape: tuple[int, int]
    index: int

    def read(self, source: WeightSource, whole: Callable[[str], Tensor]) -> Tensor:
        return source.read(self.key, self.index, self.index + 1)[0]


@dataclass(frozen=True)
class _Columns:
    """Some rows and the columns from `column` on of an expert's matrix, in one [P, R * E] for all of E experts."""

    key: str
    shape: tuple[int, int]
    rows: slice
    column: int
    expert: int
    num_experts: int

    def read(self, source: WeightSource, whole: Callable[[str], Tensor]) -> Tensor:
        rows = whole(self.key)[self.rows].unflatten(1, (-1, self.num_experts))
        return rows[:, self.column : self.column + self.shape[1], self.expert].contiguous()


class PerExpert:
    """A `WeightSource` of an adapter file in the form per_expert, whatever its own form is."""

    def __init__(self, source: WeightSource, cuts: Mapping[str, _Cut]) -> None:
        self._source = source
        self._cuts = cuts
        used = {cut.key for cut in cuts.values()}
        self._names = [name for name in source.names() if name not in used]
        # The tensors of all experts are read one after the other.
        self._whole = lru_cache(maxsize=2)(source.read)

    def names(self) -> Collection[str]:
        return [*self._names, *self._cuts]

    def shape(self, name: str) -> tuple[int, ...]:
        cut = self._cuts.get(name)
        return tuple(self._source.shape(name)) if cut is None else cut.shape

    def dtype(self, name: str) -> torch.dtype:
        cut = self._cuts.get(name)
        return self._source.dtype(name if cut is None else cut.key)

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        cut = self._cuts.get(name)
        if cut is None:
            return self._source.read(name, start, stop)
        return cut.read(self._source, self._whole)[start:stop]


def per_expert(
    config: AdapterConfig, source: WeightSource, names: ExpertNames | None = None
) -> tuple[AdapterConfig, WeightSource]:
    """The settings and the tensors of an adapter file as in the form per_expert; unchanged if that is its form.

    Args:
        names: of experts in the base's checkpoint. None: as in transformers 5, with gate_proj, up_proj and down_proj.

    Raises ValueError for tensors and parameters that are of none of the forms.
    """
    if config.form == "peft":
        return _of_wrappers(config, source, names or _NAMES)
    stacks = [found for key in source.names() if (found := _STACK.fullmatch(key)) and len(source.shape(key)) == 3]
    return _of_stacks(config, source, stacks) if stacks else (config, source)


def _of_stacks(
    config: AdapterConfig, source: WeightSource, stacks: list[re.Match[str]]
) -> tuple[AdapterConfig, WeightSource]:
    """SGLang's form. Files of other programs may not say that it is theirs, so the shapes tell what is shared."""
    counts: dict[str, int] = {}
    for found in stacks:
        counts[found["experts"]] = max(counts.get(found["experts"], 1), source.shape(found[0])[0])
    cuts: dict[str, _Cut] = {}
    sharing: set[ExpertSharing] = set()
    for found in stacks:
        key, count, (held, *shape) = found[0], counts[found["experts"]], source.shape(found[0])
        role = ROLES[found["name"]]
        if held not in (1, count):
            raise ValueError(f"{key} is of {held} experts, others of the layer are of {count}")
        is_outer = found["leaf"] == ("B" if role == "down" else "A")
        if count > 1 and held == 1 and not is_outer:
            raise ValueError(f"{key} is one for all experts; only A of gate and up and B of down can be shared alone")
        if is_outer:
            sharing.add("none" if held == count else "outer")
        leaf = _leaf_of(found["experts"], role)
        for expert in range(count):
            name = f"{PREFIX}{found['experts']}.{expert}.{leaf}.lora_{found['leaf']}.weight"
            cuts[name] = _Matrix(key, (shape[0], shape[1]), expert if held > 1 else 0)
    if len(sharing) != 1:
        raise ValueError("adapters on experts share their outer factors in some layers or projections only")
    spec = replace(config.spec, expert_sharing=sharing.pop())
    return replace(config, form="sglang", spec=spec), PerExpert(source, cuts)


def _leaf_of(experts: str, role: ExpertRole) -> str:
    """The name of a projection beside a module of experts in the same checkpoint."""
    is_usual = experts.endswith(f".{IN_MEMORY.module}")
    return {"gate": _NAMES.gate, "up": _NAMES.up, "down": _NAMES.down}[role] if is_usual else SGLANG_NAMES[role]


def _of_wrappers(config: AdapterConfig, source: WeightSource, names: ExpertNames) -> tuple[AdapterConfig, WeightSource]:
    """PEFT's form: in files of PEFT, the adapters of gate and up have the same A; in those of xorl, each its own."""
    module = names.stacks.module
    start = rf"{re.escape(PREFIX)}(?P<layer>.+)\.{re.escape(module)}"
    pattern = re.compile(rf"{start}(?P<inner>\.base_layer)?\.lora_(?P<leaf>[AB])\.weight")
    wrappers = [found for key in sorted(source.names()) if (found := pattern.fullmatch(key))]
    nested = {found["layer"] for found in wrappers if found["inner"]}
    own = gate_up_ranks(config.form_settings)
    outer = config.spec if own is None else AdapterConfig.from_json({**config.to_json(), "xorl": None}).spec
    cuts: dict[str, _Cut] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for found in wrappers:
        key, layer = found[0], found["layer"]
        experts = f"{layer}.{module}"
        parameter = _parameter_of(config, experts, is_inner=bool(found["inner"]), is_nested=layer in nested)
        stem: dict[ExpertRole, str] = {role: f"{layer}.{names.expert}.{leaf}" for role, leaf in _leaves(names).items()}
        roles: list[ExpertRole] = [role for role in stem if PARAMETERS[role] == parameter]
        rank = outer.rank_of(f"{experts}.{parameter}")
        columns: tuple[int, int] = (0, rank)
        of_roles = dict.fromkeys(roles, columns)
        if own is not None and parameter == "gate_up_proj":
            of_roles = _columns(own.get(f"{experts}.{parameter}", {}))
            if sum(stop - start for start, stop in of_roles.values()) != rank:
                raise ValueError(f"gate_up_ranks of {layer} do not add up to the rank {rank} of {parameter}")
        shape = source.shape(key)
        if len(shape) != 2 or shape[0 if found["leaf"] == "A" else 1] % rank:
            raise ValueError(f"{key} is {list(shape)}, which is no multiple of the rank {rank} of {parameter}")
        count = shape[0 if found["leaf"] == "A" else 1] // rank
        for role, (start, stop) in of_roles.items():
            ranks[stem[role]], alphas[stem[role]] = rank, outer.alpha_of(f"{experts}.{parameter}")
            num_rows = shape[0] // 2 if parameter == "gate_up_proj" else shape[0]
            rows = outputs_of(role, shape[0], names.stack)
            for expert in range(count):
                name = f"{PREFIX}{stem[role].format(expert)}.lora_{found['leaf']}.weight"
                if found["leaf"] == "A":
                    cuts[name] = _Rows(key, (stop - start, shape[1]), expert * rank + start)
                else:
                    cuts[name] = _Columns(key, (num_rows, stop - start), rows, start, expert, count)
    if own is None:
        config = _with_patterns(config, ranks, alphas)
    return config, PerExpert(source, cuts)


def _leaves(names: ExpertNames) -> dict[ExpertRole, str]:
    return {"gate": names.gate, "up": names.up, "down": names.down}


def _columns(ranks: Mapping[Literal["gate", "up"], int]) -> dict[ExpertRole, tuple[int, int]]:
    """The columns of each projection in the adapter of the parameter that stacks them."""
    columns: dict[ExpertRole, tuple[int, int]] = {}
    total = 0
    for role, rank in ranks.items():
        if rank:
            columns[role] = total, total + rank
            total += rank
    return columns


def _parameter_of(config: AdapterConfig, experts: str, *, is_inner: bool, is_nested: bool) -> str:
    """The parameter that a wrapper of PEFT adapts: gate_up_proj in the inner one of two, down_proj in the outer one."""
    if is_nested:
        return "gate_up_proj" if is_inner else "down_proj"
    targets = config.form_settings["target_parameters"]
    assert isinstance(targets, (list, tuple)), "parsed before"
    found = [
        parameter
        for parameter in ("gate_up_proj", "down_proj")
        if any(matches_name(f"{experts}.{parameter}", str(target)) for target in targets)
    ]
    if len(found) != 1:
        raise ValueError(
            f"target_parameters name {' and '.join(found) or 'no parameter'} of {experts}, but the file has one "
            "adapter for it"
        )
    return found[0]


def _with_patterns(config: AdapterConfig, ranks: Mapping[str, int], alphas: Mapping[str, float]) -> AdapterConfig:
    """Add to the spec, which has patterns for PEFT's parameters, those for the layers of experts.

    ranks, alphas: by name of the experts' layer, with {} for the number of the expert.
    """
    spec = config.spec
    return replace(
        config,
        spec=replace(
            spec,
            rank_pattern={**_patterns(ranks, spec.rank, spec.rank_pattern), **spec.rank_pattern},
            alpha_pattern={**_patterns(alphas, spec.alpha, spec.alpha_pattern), **spec.alpha_pattern},
        ),
    )


def _patterns(values: Mapping[str, ValueT], default: ValueT, others: Mapping[str, ValueT]) -> dict[str, ValueT]:
    """A pattern for each projection, or for those of each layer if these differ; none where the default applies.

    others: patterns that apply after these.
    """
    by_leaf: dict[str, set[ValueT]] = {}
    for name, value in values.items():
        by_leaf.setdefault(name.rpartition(".")[2], set()).add(value)
    patterns: dict[str, ValueT] = {}
    for name, value in values.items():
        leaf = name.rpartition(".")[2]
        if others or by_leaf[leaf] != {default}:
            shown = name if len(by_leaf[leaf]) > 1 else f"experts.{{}}.{leaf}"
            patterns[re.escape(shown).replace(re.escape("{}"), r"\d+")] = value
    return patterns
