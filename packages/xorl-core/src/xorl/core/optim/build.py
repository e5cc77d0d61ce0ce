"""Optimizers by name over named parameters, with weight decay only where it is wanted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import nn

from xorl.core.optim.sgd import SGD

OptimizerName = Literal["adamw", "sgd"]


def build_optimizer(
    name: OptimizerName,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float,
    weight_decay: float,
    no_decay_modules: Sequence[str] = (),
    no_decay_params: Sequence[str] = (),
) -> torch.optim.Optimizer:
    """An optimizer over the parameters that require gradients.

    no_decay_modules and no_decay_params are substrings of a parameter's module path and of its own last name; a
    parameter that matches either is not decayed. AdamW is the decoupled form (Loshchilov and Hutter, 2019,
    arXiv:1711.05101) with betas 0.9 and 0.999, torch's fused implementation. Both skip the whole update on the device
    when `found_inf` is set.

    Raises ValueError for a substring that matches no parameter, or if nothing is trained.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    matched: set[str] = set()
    for path, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        module, _, own = path.rpartition(".")
        hits = {s for s in no_decay_modules if s in module} | {s for s in no_decay_params if s in own}
        matched |= hits
        (kept if hits else decayed).append(parameter)
    if not decayed and not kept:
        raise ValueError("no parameter requires a gradient: there is nothing to train")
    if unmatched := sorted({*no_decay_modules, *no_decay_params} - matched):
        raise ValueError(f"train.no_decay_modules / no_decay_params: no parameter matches {', '.join(unmatched)}")
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((decayed, weight_decay), (kept, 0.0))
        if parameters
    ]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, fused=True)
    return SGD(groups, lr)
