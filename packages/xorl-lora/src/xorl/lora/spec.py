"""What to adapt: the size of the adapters and the linear layers that they go on. Nothing here changes a module."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from torch import nn


@dataclass(frozen=True)
class AdapterSpec:
    """Low-rank adapters of one rank and scale on some linear layers (Hu et al., 2021, arXiv:2106.09685).

    Attributes:
        rank: inner width of the adapters, at least 1.
        alpha: the adapters' output is multiplied by alpha / rank, so alpha need not change with the rank.
        targets: names of nn.Linear modules, or "all-linear". A name stands for every layer whose dotted name is that
            name or ends in it, in whole parts: `q_proj` for `layers.0.q_proj`, but not for `layers.0.seq_proj`.

    Raises ValueError for values out of range.
    """

    rank: int = 16
    alpha: float = 16.0
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha must be a finite number above 0, got {self.alpha}")
        if isinstance(self.targets, str):
            if self.targets != "all-linear":
                raise ValueError(f"targets must be 'all-linear' or a tuple of names, got the string {self.targets!r}")
        elif not self.targets or "" in self.targets:
            raise ValueError(f"targets must hold at least one name and no empty one, got {self.targets!r}")

    def resolve(self, model: nn.Module) -> tuple[str, ...]:
        """Full names of the linear layers of `model` that get an adapter, in the order of the modules.

        "all-linear" takes every nn.Linear that an adapter works on, the output head too, and passes over three kinds:
        one whose weight another module uses (a tied head), a subclass of nn.Linear (it may compute something else),
        and those inside torch's own attention and encoder layers, which read the weight without calling the layer.

        Raises ValueError for a name that matches no nn.Linear, with the names that exist; for a named layer of a kind
        that "all-linear" passes over; and if nothing is left to adapt.
        """
        linears = _linears(model)
        refused = [f"{name} ({reason})" for name, reason in linears.items() if reason is not None]
        if self.targets == "all-linear":
            found = tuple(name for name, reason in linears.items() if reason is None)
            if not found:
                raise ValueError(
                    f"targets 'all-linear' finds no nn.Linear to adapt in {type(model).__name__}: "
                    f"{'; '.join(refused[:5]) or 'it contains none'}"
                )
            return found
        unmatched = [target for target in self.targets if not any(_matches(name, target) for name in linears)]
        if unmatched:
            known = sorted({name.rpartition(".")[2] for name in linears})
            raise ValueError(
                f"targets {unmatched} match no nn.Linear in {type(model).__name__}; its linear layers are named {known}"
            )
        found = tuple(name for name in linears if any(_matches(name, target) for target in self.targets))
        blocked = [f"{name} ({linears[name]})" for name in found if linears[name] is not None]
        if blocked:
            raise ValueError(
                f"targets {list(self.targets)} name layers that cannot be adapted: {'; '.join(blocked[:5])}"
            )
        return found


def _linears(model: nn.Module) -> dict[str, str | None]:
    """The full name of every nn.Linear inside `model`, and why an adapter cannot go on it, or None."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {
        f"{parent_name}.{name}".removeprefix("."): _refusal(parent, linear, uses[id(linear.weight)])
        for parent_name, parent in model.named_modules()
        for name, linear in parent.named_children()
        if isinstance(linear, nn.Linear)
    }


def _refusal(parent: nn.Module, linear: nn.Linear, num_uses: int) -> str | None:
    if type(linear) is not nn.Linear:
        return f"it is a {type(linear).__name__}, not a plain nn.Linear"
    if isinstance(parent, nn.TransformerEncoderLayer):
        return "in inference nn.TransformerEncoderLayer reads its weight without calling it"
    if num_uses > 1:
        return "another module uses its weight, which merging would change there too"
    if linear.weight.is_meta:
        return "it is on the meta device and has no values yet"
    return None


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
