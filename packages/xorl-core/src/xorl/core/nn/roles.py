"""The roles of parameters, which each module declares: initial values, optimizers and checks depend on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Protocol, runtime_checkable

Role = Literal["dense", "expert", "router", "bias", "norm", "embedding", "head", "adapter"]
"""dense: a matrix of a linear layer; expert: the matrices of all experts of a layer; adapter: any of its parameters."""


@runtime_checkable
class DeclaresRoles(Protocol):
    """A module that owns parameters. `roles` maps their names to roles."""

    roles: ClassVar[Mapping[str, Role]]


@runtime_checkable
class StacksMatrices(Protocol):
    """A module whose parameters stack several matrices. `matrix_rows` maps their names to the rows of each."""

    @property
    def matrix_rows(self) -> Mapping[str, Sequence[int]]: ...
