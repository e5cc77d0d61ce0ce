"""The roles of parameters, which each module declares: initial values, optimizers and checks depend on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal, Protocol, TypeVar, cast

DeclaredT = TypeVar("DeclaredT")

Role = Literal[
    "dense",
    "expert",
    "router",
    "correction",
    "bias",
    "norm",
    "embedding",
    "head",
    "taps",
    "recurrence",
    "scalar",
    "constant",
    "adapter",
]
"""dense: a matrix of a linear layer; expert: the matrices of all experts of a layer; correction: what routers add to
scores, frozen; taps: of a convolution, [C, 1, W]; recurrence: numbers of the heads of a recurrence; scalar: one number,
or one for each head; constant: one number that is never trained, 0-dimensional in checkpoints; adapter: any of its
parameters. Modules with recurrences, and those whose scalars or constants are not drawn, are `StatesInitialValues`."""

IN_FP32: frozenset[Role] = frozenset({"correction", "recurrence"})
"""The roles of parameters that are in fp32 whatever the dtype of others, on devices, in collectives and in files."""
NOT_DECAYED: frozenset[Role] = frozenset({"recurrence", "scalar"})
"""The roles of parameters that have no weight decay."""


@dataclass(frozen=True)
class LogUniform:
    """Initial values whose exponentials are drawn evenly from `low` to `high`."""

    low: float
    high: float


@dataclass(frozen=True)
class SoftplusLogUniform:
    """Initial values whose softplus has a logarithm that is drawn evenly between those of `low` and `high`."""

    low: float
    high: float


Drawn = LogUniform | SoftplusLogUniform
InitialValue = float | Drawn


class DeclaresRoles(Protocol):
    """A module that owns parameters. `roles` maps their names to roles."""

    roles: ClassVar[Mapping[str, Role]]


class StatesInitialValues(Protocol):
    """A module that sets values of its own. `initial_values` maps names of parameters to what these start with."""

    initial_values: ClassVar[Mapping[str, InitialValue]]


class StoresWeight(Protocol):
    """A module whose frozen weight may be in another format, such as quantised.

    `stored` names the parameters that hold it then, including `weight`. Code that knows the format sets their values.
    They are gathered in their own dtype, and have the role of the weight.
    """

    stored: ClassVar[tuple[str, ...]]


class StacksMatrices(Protocol):
    """A module whose parameters stack several matrices. `matrix_rows` maps their names to the rows of each."""

    @property
    def matrix_rows(self) -> Mapping[str, Sequence[int]]: ...


def declared(module: object, protocol: type[DeclaredT]) -> DeclaredT | None:
    """The module as one of these protocols, or None if it lacks a member.

    `isinstance` would take 0.1 ms for each module, and models are searched several times while they are built.
    """
    return cast("DeclaredT", module) if all(hasattr(module, name) for name in _members(protocol)) else None


@cache
def _members(protocol: type) -> tuple[str, ...]:
    return tuple(name for name in {**protocol.__annotations__, **vars(protocol)} if not name.startswith("_"))
