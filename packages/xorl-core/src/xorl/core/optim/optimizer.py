"""Optimizers by name over named parameters, with weight decay only where it is wanted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from xorl.core.optim.adamw import AdamW, noise_key
from xorl.core.optim.muon import Muon, MuonOptions
from xorl.core.optim.sgd import SGD

OptimizerName = Literal["adamw", "sgd", "anyprecision_adamw", "muon"]


def build_optimizer(
    name: OptimizerName,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float,
    weight_decay: float,
    no_decay_modules: Sequence[str] = (),
    no_decay_params: Sequence[str] = (),
    state_dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    muon: MuonOptions | None = None,
) -> torch.optim.Optimizer:
    """An optimizer over the parameters that require gradients, which are placed already.

    Each group has an `lr_scale`, by which the schedule's learning rate is multiplied for it; `lr` is the schedule's
    peak. no_decay_modules and no_decay_params are substrings of a parameter's module path and of its own last name; a
    parameter that matches either is not decayed. Weight decay is decoupled. All of them take gradients of fp32 or of
    the parameter's dtype, divide them by `grad_scale` as they read them and skip the whole update where `found_inf` is
    not zero: two attributes, tensors that are read on the device.

    state_dtype and seed (of stochastic rounding) are those of anyprecision_adamw and muon; muon needs its options.

    Raises ValueError for a substring that matches no parameter, or if nothing is trained.
    """
    trained = [(path, parameter) for path, parameter in named_parameters if parameter.requires_grad]
    decays = weight_decays(trained, weight_decay, no_decay_modules, no_decay_params)
    groups: dict[tuple[bool, float], dict[str, Any]] = {}
    for (path, parameter), decay in zip(trained, decays, strict=True):
        is_matrix = name == "muon" and muon is not None and path in muon.matrices
        lr_scale = muon.lr / lr if is_matrix and muon is not None else 1.0
        group = groups.setdefault((is_matrix, decay), {"params": [], "weight_decay": decay, "lr_scale": lr_scale})
        group["params"].append(parameter)
        if name in ("anyprecision_adamw", "muon"):
            group.setdefault("keys", []).append(noise_key(seed, path))
        if is_matrix and muon is not None:
            group.setdefault("matrices", []).append(tuple(muon.matrices[path]))
    if name == "adamw":
        return AdamW(groups.values(), lr)
    if name == "anyprecision_adamw":
        return AdamW(groups.values(), lr, state_dtype=state_dtype)
    if name == "muon":
        assert muon is not None, "muon needs its options"
        return Muon(groups.values(), lr, muon, state_dtype=state_dtype)
    return SGD(groups.values(), lr)


def weight_decays(
    trained: Sequence[tuple[str, nn.Parameter]],
    weight_decay: float,
    no_decay_modules: Sequence[str],
    no_decay_params: Sequence[str],
) -> list[float]:
    """The weight decay of each of the parameters that are trained.

    Raises ValueError for a substring that matches none of them, or if there is none.
    """
    if not trained:
        raise ValueError("no parameter requires a gradient: there is nothing to train")
    modules, names = zip(*(path.rpartition(".")[::2] for path, _ in trained), strict=True)
    for option, given, places in (("modules", no_decay_modules, modules), ("params", no_decay_params, names)):
        if unmatched := sorted(part for part in given if not any(part in place for place in places)):
            raise ValueError(f"train.no_decay_{option}: no trained parameter matches {', '.join(unmatched)}")
    return [
        0.0
        if any(part in module for part in no_decay_modules) or any(part in name for part in no_decay_params)
        else weight_decay
        for module, name in zip(modules, names, strict=True)
    ]
