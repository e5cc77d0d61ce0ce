"""The roles of parameters, which each module declares: initial values, optimizers and checks depend on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Protocol, runtime_checkable

Role = Literal[
    "dense", "expert", "router", "correction", "bias", "norm", "embedding", "head", "scalar", "constant", "adapter"
]
"""dense: a matrix of a linear layer; expert: the matrices of all experts of a layer; correction: what routers add to
scores, frozen and in fp32 whatever the dtype of others; scalar: one number, or one for each head, without weight decay;
constant: one number that is never trained, 0-dimensional in checkpoints; adapter: any of its parameters. Modules whose
scalars or constants are not drawn are `StatesInitialValues`."""


@runtime_checkable
class DeclaresRoles(Protocol):
    """A module that owns parameters. `roles` maps their names to roles."""

    roles: ClassVar[Mapping[str, Role]]


@runtime_checkable
class StatesInitialValues(Protocol):
    """A module whose scalars or constants are not drawn. `initial_values` maps their names to their first values."""

    initial_values: ClassVar[Mapping[str, float]]


@runtime_checkable
class StoresWeight(Protocol):
    """A module whose frozen weight may be in another format, such as quantised.

    `stored` names the parameters that hold it then, including `weight`. Code that knows the format sets their values.
    They are gathered in their own dtype, and have the role of the weight.
    """

    stored: ClassVar[tuple[str, ...]]


@runtime_checkable
class StacksMatrices(Protocol):
    """A module whose parameters stack several matrices. `matrix_rows` maps their names to the rows of each."""

    @property
    def matrix_rows(self) -> Mapping[str, Sequence[int]]: ...
