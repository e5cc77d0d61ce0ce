"""AdapterSpec: which layers get an adapter, and their ranks and scales.

targets.py resolves the names to layers of a model, and inject.py applies a spec.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar, cast, get_args

from xorl.lora.arguments import check_instance, check_integer, check_names, check_number

ValueT = TypeVar("ValueT", int, float)
ExpertSharing: TypeAlias = Literal["none", "outer", "all"]
# Scales are stored in fp32, whose maximum is 3.4e38, and a scale is at most alpha for any rank.
LARGEST_ALPHA = 1e38


@dataclass(frozen=True)
class AdapterSpec:
    """Low-rank adapters on some layers (Hu et al., 2021, arXiv:2106.09685).

    Attributes:
        rank: inner width of the adapters, at least 1.
        alpha: the adapters' output is multiplied by alpha / rank, so alpha need not change with the rank.
        targets: names of layers, or "all-linear". A name matches every layer whose dotted name is that name or ends
            with it, in whole parts: `q_proj` matches `layers.0.q_proj`, but not `layers.0.seq_proj`.
        dropout: the dropout probability on an adapter's inputs in training.
        use_rslora: multiply by alpha / sqrt(rank), so that the updates do not shrink with the rank (Kalajdzievski,
            2023, arXiv:2312.03732).
        use_dora: train the norms of the rows of the adapted weight separately from their directions (Liu et al., 2024,
            arXiv:2402.09353). Not for embeddings.
        rank_pattern, alpha_pattern: regular expression -> rank or alpha of the layers whose names end, in whole parts,
            with a match. The first matching expression applies.
        modules_to_save: names of modules, as in targets, whose own weights are trained in addition to the adapters.
        expert_sharing: what the adapters on the experts of a layer have in common: nothing; the "outer" factors, which
            are A of the gate and the up projection and B of the down projection; or "all" factors.

    Raises ValueError for values of another type or out of range.
    """

    rank: int = 16
    alpha: float = 16.0
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    expert_sharing: ExpertSharing = "none"

    def __post_init__(self) -> None:
        check_instance("rank_pattern", self.rank_pattern, Mapping)
        check_instance("alpha_pattern", self.alpha_pattern, Mapping)
        for name, rank in {"rank": self.rank, **_named("rank_pattern", self.rank_pattern)}.items():
            check_integer(name, rank, at_least=1)
        for name, alpha in {"alpha": self.alpha, **_named("alpha_pattern", self.alpha_pattern)}.items():
            check_number(name, alpha)
            if not alpha > 0:
                raise ValueError(f"{name} must be above 0, got {alpha}")
            if alpha > LARGEST_ALPHA:
                raise ValueError(f"{name} must be at most {LARGEST_ALPHA:g}, got {alpha}")
        check_instance("use_rslora", self.use_rslora, bool)
        check_instance("use_dora", self.use_dora, bool)
        check_number("dropout", self.dropout)
        check_names("modules_to_save", self.modules_to_save)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if self.expert_sharing not in get_args(ExpertSharing):
            raise ValueError(f"expert_sharing must be one of {get_args(ExpertSharing)}, got {self.expert_sharing!r}")
        if isinstance(self.targets, str):
            if self.targets != "all-linear":
                raise ValueError(f"targets must be 'all-linear' or a tuple of names, got the string {self.targets!r}")
        else:
            check_names("targets", self.targets)
            if not self.targets or "" in self.targets:
                raise ValueError(f"targets must contain at least one name, and no empty ones, got {self.targets!r}")
        for option, patterns in (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern)):
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"{option}: {pattern!r} is not a valid regular expression: {error}") from error

    def rank_of(self, *names: str) -> int:
        """The rank of the adapter on a layer, of which a pattern may match any of `names`."""
        return _by_pattern(self.rank_pattern, names, self.rank)

    def alpha_of(self, *names: str) -> float:
        """The alpha of the adapter on a layer."""
        return _by_pattern(self.alpha_pattern, names, self.alpha)

    def scale_of(self, *names: str) -> float:
        """The factor on the output of the adapter on a layer."""
        rank = self.rank_of(*names)
        return self.alpha_of(*names) / (math.sqrt(rank) if self.use_rslora else rank)

    def check_patterns(self, names: Sequence[str]) -> None:
        """Raise ValueError for a pattern that matches none of the adapted layers."""
        for option, patterns in (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern)):
            for pattern in patterns:
                if not any(matches_pattern(pattern, name) for name in names):
                    raise ValueError(f"{option}: {pattern!r} does not match any adapted layer (for example {names[0]})")


def spec_of(targets: Sequence[str] | str, rank: int = 1) -> AdapterSpec:
    """A spec for these targets, for functions that only need the layers. Raises ValueError as AdapterSpec does."""
    return AdapterSpec(
        rank, targets=cast("Literal['all-linear']", targets) if isinstance(targets, str) else tuple(targets)
    )


def matches_name(name: str, target: str) -> bool:
    """Whether `name` is `target` or ends with it, in whole parts."""
    return name == target or name.endswith(f".{target}")


def _by_pattern(patterns: Mapping[str, ValueT], names: Sequence[str], default: ValueT) -> ValueT:
    matching = (value for pattern, value in patterns.items() if any(matches_pattern(pattern, name) for name in names))
    return next(matching, default)


def matches_pattern(pattern: str, name: str) -> bool:
    """Whether `name` ends, in whole parts, with a match of the regular expression `pattern`."""
    return re.fullmatch(rf"(.*\.)?({pattern})", name) is not None


def _named(option: str, values: Mapping[str, ValueT]) -> dict[str, ValueT]:
    return {f"{option}[{key!r}]": value for key, value in values.items()}
