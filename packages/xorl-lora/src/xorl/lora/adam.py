"""The hyperparameters of a step of a bank's adapter, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from xorl.lora.arguments import check_number


@dataclass(frozen=True)
class Adam:
    """Hyperparameters of one step of AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101). Raises ValueError."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_number(name, getattr(self, name))
        if not (isinstance(self.betas, (tuple, list)) and len(self.betas) == 2):
            raise ValueError(f"betas must be two numbers, got {self.betas!r}")
        for beta in self.betas:
            check_number("betas", beta)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {self.betas}")
        if not self.eps > 0:
            raise ValueError(f"eps must be above 0, got {self.eps}")
        for name in ("lr", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")


class StepOutcome(NamedTuple):
    """The result of a step, as 0-dim fp32 tensors on the device.

    grad_norm: the norm of the divided gradient.
    skipped: 1 if the norm was not finite, else 0. A skipped step changes nothing.
    norms: the norms of the undivided gradient by kind of layer; empty unless requested.
    """

    grad_norm: Tensor
    skipped: Tensor
    norms: dict[str, Tensor]
