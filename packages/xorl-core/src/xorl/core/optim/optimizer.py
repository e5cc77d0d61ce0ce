"""Builds optimizers by name, with parameter groups for weight decay."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from xorl.core.nn.share import Share
from xorl.core.optim.adamw import AdamW, noise_key
from xorl.core.optim.decay import (
    RowDecay,
    Stacked,
    require_no_decay_matches,
    row_decays,
    tensor_names,
    undecayed,
)
from xorl.core.optim.muon import Muon, MuonOptions
from xorl.core.optim.sgd import SGD
from xorl.kernels.arguments import check_choice, check_number

OptimizerName = Literal["adamw", "sgd", "anyprecision_adamw", "muon"]
# The dtypes that the kernels of the updates can store.
STATE_DTYPES = (torch.float32, torch.bfloat16)


def build_optimizer(
    name: OptimizerName,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float,
    weight_decay: float,
    no_decay_modules: Sequence[str] = (),
    no_decay_params: Sequence[str] = (),
    never_decayed: Collection[str] = (),
    state_dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    muon: MuonOptions | None = None,
    shares: Mapping[str, Share] = MappingProxyType({}),
    lr_scales: Mapping[str, float] = MappingProxyType({}),
    stacked: Stacked = MappingProxyType({}),
    all_names: Sequence[str] | None = None,
) -> torch.optim.Optimizer:
    """Build an optimizer over the parameters that require gradients. Shard or replicate the model first.

    All optimizers use decoupled weight decay and accept gradients in fp32 or in the parameter's dtype. Like torch's
    fused optimizers, they divide gradients by the attribute `grad_scale` and skip the update if `found_inf` is not
    zero; both are tensors and are read on the device.

    Args:
        lr: the peak of the schedule. Each group has an `lr_scale`, which multiplies its learning rate; `lr_scales`
            are those of parameters by name, if not 1. Matrices of muon have that of `muon`.
        weight_decay: of all parameters but those that the next arguments select. Each group says with `decays`
            whether it may have any, for callers that change it later.
        no_decay_modules, no_decay_params: matched against module paths and against the last parts of names; tensors
            that either selects have no weight decay. See `undecayed`.
        never_decayed: the names of further parameters without weight decay.
        state_dtype, seed: for anyprecision_adamw and muon, the dtype of the state and the seed of stochastic rounding.
        muon: options that the optimizer `muon` requires.
        shares: what the modules hold of parameters that they do not hold as a whole. Stochastic rounding and
            `stacked` go by the rows of whole parameters.
        stacked: for parameters that stack several tensors: the names of these tensors, which `no_decay_modules` and
            `no_decay_params` select, and their numbers of rows in the whole parameter.
        all_names: of a stage of a pipeline, the names of the tensors of all stages; the stage itself may train none.

    Raises ValueError for an unknown name, for an argument of the wrong type or out of range, for two parameters of the
    same name, for an entry of no_decay_* or a matrix of muon that matches no parameter, trained or frozen, if no
    parameter requires a gradient, or if one is on the meta device: build the optimizer after `parallelize`, which may
    replace the parameters.
    """
    check_choice("name", name, OptimizerName)
    check_number("lr", lr)
    check_number("weight_decay", weight_decay)
    _check_state_dtype(state_dtype)
    _check_muon(name, muon, lr)
    named = _named(named_parameters)
    if muon is not None:
        _check_matrices(muon, named)
    names = tensor_names(named, stacked) if all_names is None else all_names
    require_no_decay_matches(names, no_decay_modules, no_decay_params)
    trained = [(path, parameter) for path, parameter in named.items() if parameter.requires_grad]
    _check_trained(named, [path for path, _ in trained], may_be_none=all_names is not None)
    free = undecayed(names, no_decay_modules, no_decay_params) | set(tensor_names(never_decayed, stacked))
    groups: dict[tuple[bool, float, _Decay], dict[str, Any]] = {}
    for path, parameter in trained:
        decay = _Decay.of(stacked.get(path, [(path, 1)]), free, weight_decay)
        is_matrix = name == "muon" and muon is not None and path in muon.matrices
        lr_scale = muon.lr / lr if is_matrix and muon is not None else lr_scales.get(path, 1.0)
        group = groups.setdefault((is_matrix, lr_scale, decay), {"params": [], **asdict(decay), "lr_scale": lr_scale})
        group["params"].append(parameter)
        group.setdefault("shares", []).append(shares.get(path))
        if name in ("anyprecision_adamw", "muon"):
            group.setdefault("keys", []).append(noise_key(seed, path))
        if is_matrix and muon is not None:
            group.setdefault("matrices", []).append(tuple(muon.matrices[path]))
            group.setdefault("divided", []).append(tuple(muon.divided.get(path, [None])))
    none = {"params": [], **asdict(_Decay(weight_decay, True, ())), "lr_scale": 1.0}
    filled = [*groups.values()] or [none]
    if name == "adamw":
        return AdamW(filled, lr)
    if name == "anyprecision_adamw":
        return AdamW(filled, lr, state_dtype=state_dtype)
    if name == "muon":
        assert muon is not None
        return Muon(filled, lr, muon, state_dtype=state_dtype)
    return SGD(filled, lr)


@dataclass(frozen=True)
class _Decay:
    """What the group of a parameter says about weight decay; `row_decays` if it differs between the rows."""

    weight_decay: float
    decays: bool
    row_decays: tuple[RowDecay, ...]

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, int]], free: Collection[str], weight_decay: float) -> _Decay:
        """That of a parameter that stacks `tensors`, given as names and numbers of rows; `free` have none."""
        decays = any(tensor not in free for tensor, _ in tensors)
        rows = row_decays(tensors, free, weight_decay)
        return cls(weight_decay if decays else 0.0, decays, rows if len(rows) > 1 else ())


def _check_state_dtype(state_dtype: object) -> None:
    if state_dtype not in STATE_DTYPES:
        known = " or ".join(map(str, STATE_DTYPES))
        raise ValueError(f"state_dtype: must be a torch.dtype, {known}, got {state_dtype!r}")


def _check_trained(named: Mapping[str, nn.Parameter], trained: Sequence[str], *, may_be_none: bool) -> None:
    if not trained and not may_be_none:
        raise ValueError("no parameter requires a gradient: there is nothing to train")
    if any(parameter.is_meta for parameter in named.values()):
        raise ValueError("named_parameters: some are on the meta device; build the optimizer after `parallelize`")


def _check_muon(name: OptimizerName, muon: object, lr: float) -> None:
    """Raise ValueError if `muon` is not MuonOptions, or if the optimizer muon lacks them or has no rate to scale."""
    if not isinstance(muon, MuonOptions | None):
        raise ValueError(f"muon: must be MuonOptions, got {type(muon).__name__}")
    if name == "muon" and muon is None:
        raise ValueError("muon: the optimizer muon needs MuonOptions, which say what each parameter stacks; got None")
    if name == "muon" and not lr:
        raise ValueError("lr: is 0, but muon multiplies the schedule's rate by muon.lr / lr; use one above 0")


def _check_matrices(muon: MuonOptions, named: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError for a name of no parameter of two dims, and for rows that are not those of the parameter."""
    for path, rows in muon.matrices.items():
        if path not in named or named[path].dim() != 2:
            fault = f"has {named[path].dim()} dims instead of two" if path in named else "is no parameter"
            raise ValueError(f"muon: matrices names {path!r}, which {fault}; name those that muon updates")
        num_rows = muon.divided[path][0].num_rows if path in muon.divided else named[path].shape[0]
        if any(count < 1 for count in rows) or sum(rows) != num_rows:
            raise ValueError(
                f"muon: matrices gives {path!r} matrices of {list(rows)} rows, which are {sum(rows)} rows in all; "
                f"the parameter has {num_rows}"
            )


def _named(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError("named_parameters: must be pairs of a name and a parameter: pass model.named_parameters()")
    named = dict(pairs)
    if len(named) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in named if names.count(name) > 1)
        raise ValueError(f"named_parameters: {repeated!r} is there twice; give each parameter a name of its own")
    return named
