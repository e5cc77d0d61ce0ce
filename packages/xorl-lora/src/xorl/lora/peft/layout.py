"""The tensors of an adapter file: parsing of their names, and validation against the configuration and a base model.

Module names are those of the base model in transformers, without fused layers. This module does no file I/O.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor

from xorl.core.models.recipes import WeightSource
from xorl.lora.linear import Leaf
from xorl.lora.peft.config import CONFIG_FILE, AdapterConfig
from xorl.lora.spec import AdapterSpec, ValueT, matches_pattern

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."

ModuleKind: TypeAlias = Literal["linear", "embedding"]
_LEAVES: Mapping[ModuleKind, tuple[str, str]] = {
    "linear": ("lora_A.weight", "lora_B.weight"),
    "embedding": ("lora_embedding_A", "lora_embedding_B"),
}
_MAGNITUDE = "lora_magnitude_vector"
# For an adapted embedding or head, the file also contains a copy of the base's weight.
_BASE_COPY = ".base_layer."
_LEAF = re.compile(
    r"(?P<module>.+)\.(?:(?P<a>lora_A\.weight|lora_embedding_A)|(?P<b>lora_B\.weight|lora_embedding_B)"
    rf"|(?P<magnitude>{_MAGNITUDE}(?:\.weight)?))"
)


ExpertRole: TypeAlias = Literal["gate", "up", "down"]
# The projections of an expert, by their names in the checkpoints of all families.
ROLES: Mapping[str, ExpertRole] = MappingProxyType(
    {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
)
# The layer of an expert.
MEMBER = re.compile(r"(?P<layer>.+)\.(?P<module>[^.]+\.experts)\.(?P<expert>\d+)\.(?P<leaf>[^.]+)")


@dataclass(frozen=True)
class AdaptedModule:
    """One adapted module of a file: the names of its tensors in the file, and their sizes.

    A is [rank, in_features] and B [out_features, rank]; for an embedding, in_features is its number of rows.
    """

    kind: ModuleKind
    a: str
    b: str
    magnitude: str | None
    rank: int
    in_features: int
    out_features: int

    def key(self, leaf: Leaf) -> str:
        """The name of A or B in the file."""
        return self.a if leaf == "A" else self.b


@dataclass(frozen=True)
class AdapterLayout:
    """The content of an adapter file.

    Attributes:
        config: the settings of its adapter_config.json.
        modules: the adapted modules, by name in the base model.
        replaced: the base tensors that the file contains whole (trained or copied): name in the base -> name in it.
        shapes: the shape of every tensor in the file.
    """

    config: AdapterConfig
    modules: Mapping[str, AdaptedModule]
    replaced: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def spec(self) -> AdapterSpec:
        """The adapters, with full names of the adapted modules and of modules trained whole.

        The name of a projection of experts has no number.
        """
        saved = {name.rpartition(".")[0] for name, key in self.replaced.items() if _BASE_COPY not in key}
        spec = self.config.spec
        return replace(
            spec,
            # All experts of a layer at once, because there may be tens of thousands.
            targets=tuple(
                dict.fromkeys(name if (found := expert_of(name)) is None else found[0] for name in self.modules)
            ),
            # PEFT accepts patterns that match nothing, but `inject` does not.
            rank_pattern=self._matching(spec.rank_pattern),
            alpha_pattern=self._matching(spec.alpha_pattern),
            modules_to_save=tuple(sorted(saved)),
        )

    def _matching(self, patterns: Mapping[str, ValueT]) -> dict[str, ValueT]:
        return {
            key: value for key, value in patterns.items() if any(matches_pattern(key, name) for name in self.modules)
        }


@dataclass(frozen=True)
class FileTensors:
    """fp32 tensors of a file that are made together: their shapes by name.

    `make` returns their values on every rank, and is collective if the model is sharded.
    """

    shapes: Mapping[str, tuple[int, ...]]
    make: Callable[[], Mapping[str, Tensor]]


class InMemoryTensors:
    """A `WeightSource` of named tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        tensor = self._tensors[name]
        return tensor if start is None and stop is None else tensor[start:stop]  # numbers have no ranges


class MadeTensors:
    """A `WeightSource` of tensors that are made when they are read, all in `dtype`."""

    def __init__(self, groups: Sequence[FileTensors], dtype: torch.dtype) -> None:
        self._groups = {name: group for group in groups for name in group.shapes}
        self._dtype = dtype
        # The tensors of a group are read one after the other.
        self._made: tuple[FileTensors | None, Mapping[str, Tensor]] = (None, {})

    def names(self) -> Collection[str]:
        return self._groups.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._groups[name].shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        group = self._groups[name]
        if self._made[0] is not group:
            self._made = group, group.make()
        return self._made[1][name][start:stop].to(self._dtype)


class ReplacedTensors:
    """A `WeightSource` of the base tensors that an adapter file contains whole, under the base's names."""

    def __init__(self, layout: AdapterLayout, source: WeightSource) -> None:
        self._keys = layout.replaced
        self._source = source

    def names(self) -> Collection[str]:
        return self._keys.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._keys[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._keys[name])

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        return self._source.read(self._keys[name], start, stop)


def expert_of(name: str) -> tuple[str, int] | None:
    """For the layer of an expert in a checkpoint, its name without the expert's number, and the number; or None."""
    found = MEMBER.fullmatch(name)
    if found is None or found["leaf"] not in ROLES:
        return None
    return f"{found['layer']}.{found['module']}.{found['leaf']}", int(found["expert"])


def keys_of(module: str, kind: ModuleKind = "linear") -> tuple[str, str, str]:
    """The names in a file of a module's A, B and magnitudes."""
    a, b = _LEAVES[kind]
    return f"{PREFIX}{module}.{a}", f"{PREFIX}{module}.{b}", f"{PREFIX}{module}.{_MAGNITUDE}"


def read_layout(config: AdapterConfig, source: WeightSource) -> AdapterLayout:
    """Parse the tensors of `source`, an adapter file. Raises ValueError with a list of the problems."""
    found: dict[str, dict[str, str]] = {}
    replaced: dict[str, str] = {}
    problems: list[str] = []
    for key in sorted(source.names()):
        leaf = _LEAF.fullmatch(key.removeprefix(PREFIX))
        if not key.startswith(PREFIX):
            problems.append(f"{key}: the name does not start with PEFT's prefix {PREFIX}")
        elif leaf is not None:
            part = cast(str, leaf.lastgroup)
            found.setdefault(leaf["module"], {})[part] = key
        elif ".lora_" in key:
            problems.append(f"{key}: not a tensor name that PEFT writes; the file may be a raw state dict")
        else:
            replaced[key.removeprefix(PREFIX).replace(_BASE_COPY, ".")] = key
    shapes = {key: tuple(source.shape(key)) for key in source.names()}
    modules: dict[str, AdaptedModule] = {}
    for module, parts in found.items():
        adapted = _module(config, module, parts, shapes, problems)
        if adapted is not None:
            modules[module] = adapted
    if not found and not replaced:
        problems.append("the file has no tensors")
    saved = [name for name, key in replaced.items() if _BASE_COPY not in key]
    problems += [
        f"{PREFIX}{name}: modules_to_save {list(config.spec.modules_to_save)} does not name its module"
        for name in saved
        if not any(_ends_with(name.rpartition(".")[0], wanted) for wanted in config.spec.modules_to_save)
    ]
    if problems:
        raise ValueError(_listed("the adapter is invalid", problems))
    return AdapterLayout(config, modules, replaced, shapes)


def read_shared(layout: AdapterLayout, source: WeightSource, members: Sequence[str], leaf: Leaf) -> Tensor:
    """The factor A or B that the modules `members` of experts share.

    Raises ValueError if it is not the same for all.
    """
    keys = [layout.modules[member].key(leaf) for member in members]
    first = source.read(keys[0])
    # SGLang's form holds one for all experts, the others a copy for each.
    for member, key in zip(members, keys, strict=True) if layout.config.form != "sglang" else ():
        if not torch.equal(source.read(key), first):
            raise ValueError(f"{member}: lora_{leaf} differs from that of {members[0]}, but the experts share it")
    return first


def _module(
    config: AdapterConfig,
    module: str,
    parts: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    problems: list[str],
) -> AdaptedModule | None:
    """One module of a file; None if it is invalid, with the reason added to `problems`."""
    missing = [name for name in ("a", "b", *(["magnitude"] if config.spec.use_dora else [])) if name not in parts]
    if missing:
        leaf = {"a": "lora_A", "b": "lora_B", "magnitude": f"{_MAGNITUDE}, although use_dora is true"}
        problems.append(f"{module}: missing {' and '.join(leaf[name] for name in missing)}")
        return None
    a, b, magnitude = shapes[parts["a"]], shapes[parts["b"]], parts.get("magnitude")
    kind: ModuleKind = "embedding" if "lora_embedding" in parts["a"] else "linear"
    rank = config.spec.rank_of(module)
    before = len(problems)
    if len(a) != 2 or len(b) != 2 or 0 in (*a, *b):
        problems.append(f"{module}: A is {list(a)} and B {list(b)}; both must be matrices")
    elif a[0] != b[1] or a[0] != rank:
        problems.append(f"{module}: A is {list(a)} and B {list(b)}, but the rank in {CONFIG_FILE} is {rank}")
    elif magnitude is not None and not config.spec.use_dora:
        problems.append(f"{module}: it has magnitudes, but use_dora in {CONFIG_FILE} is false")
    elif magnitude is not None and math.prod(shapes[magnitude]) != b[0]:
        problems.append(f"{module}: it has {math.prod(shapes[magnitude])} magnitudes for {b[0]} output features")
    if len(problems) > before:
        return None
    return AdaptedModule(kind, parts["a"], parts["b"], magnitude, rank, a[1], b[0])


def _listed(title: str, problems: Sequence[str]) -> str:
    more = [f"... and {len(problems) - 5} more"] if len(problems) > 5 else []
    return "\n  ".join([f"{title} ({len(problems)} problems)", *problems[:5], *more])


def _ends_with(name: str, end: str) -> bool:
    return name.endswith(end) or f".{end}." in f".{name}."
