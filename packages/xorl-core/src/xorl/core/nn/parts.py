"""What a rank's module holds of a parameter, if other ranks hold the rest. FSDP2 shards that part further."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn


@dataclass(frozen=True)
class Part:
    """Some rows of a whole parameter.

    Attributes:
        num_rows: of the whole parameter.
        rows: ranges [start, stop) of its rows, in the order in which the module holds them.
        sharded_over: the axes of the mesh whose ranks hold the other rows; see `Mesh.axis`.
    """

    num_rows: int
    rows: tuple[tuple[int, int], ...]
    sharded_over: tuple[str, ...]


@runtime_checkable
class DeclaresParts(Protocol):
    """A module that may hold parts of its parameters. `parts` maps the names of these to what it holds."""

    @property
    def parts(self) -> Mapping[str, Part]: ...


def parameter_parts(model: nn.Module) -> dict[str, Part]:
    """The parts of all parameters that `model` does not hold as a whole, by name."""
    return {
        f"{path}.{name}" if path else name: part
        for path, module in model.named_modules()
        if isinstance(module, DeclaresParts)
        for name, part in module.parts.items()
    }
