"""The table of losses by name, and the options that clients may give."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType, UnionType
from typing import Literal, get_args, get_origin, get_type_hints

from xorl.core.loss import objectives
from xorl.core.loss.cross_entropy import weighted_cross_entropy
from xorl.core.loss.output import HeadLoss
from xorl.core.loss.policy import PolicyLoss, PolicyOptions

LOSSES: Mapping[str, HeadLoss] = MappingProxyType(
    {
        "cross_entropy": weighted_cross_entropy,
        "causallm_loss": weighted_cross_entropy,
        "importance_sampling": PolicyLoss("importance_sampling", objectives.importance_sampling, PolicyOptions()),
        "ppo": PolicyLoss("ppo", objectives.ppo, objectives.ClipOptions()),
        "gspo": PolicyLoss("gspo", objectives.gspo, objectives.GspoOptions()),
        "policy_loss": PolicyLoss("policy_loss", objectives.policy_loss, objectives.ClippedPolicyOptions()),
        "cispo": PolicyLoss("cispo", objectives.cispo, objectives.CispoOptions()),
        "dro": PolicyLoss("dro", objectives.dro, objectives.DroOptions()),
        "drgrpo": PolicyLoss("drgrpo", objectives.drgrpo, objectives.DrgrpoOptions()),
    }
)


def loss_named(name: str, options: Mapping[str, object] = MappingProxyType({})) -> HeadLoss:
    """The loss of that name with these options; options that are left out have their defaults.

    Switches may also be given as 0 and 1, since one of the protocols carries only numbers.

    Raises:
        ValueError: there is no such loss or option, or the loss cannot take the value.
    """
    if name not in LOSSES:
        raise ValueError(f"there is no loss {name!r}; there are {', '.join(LOSSES)}")
    loss = LOSSES[name]
    known = get_type_hints(type(loss.options)) if isinstance(loss, PolicyLoss) else {}
    unknown = sorted(set(options) - set(known))
    if unknown:
        has = f"it has {', '.join(sorted(known))}" if known else "it has none"
        raise ValueError(f"loss {name!r} has no option {unknown[0]!r}; {has}")
    if not isinstance(loss, PolicyLoss):
        return loss
    values = {key: _read(f"loss {name!r}: option {key!r}", known[key], value) for key, value in options.items()}
    try:
        return replace(loss, options=replace(loss.options, **values))
    except ValueError as problem:
        raise ValueError(f"loss {name!r}: {problem}") from None


def check_inputs(loss: HeadLoss, names: Collection[str]) -> None:
    """Raise ValueError if the loss needs an input that is not among `names`, the fields of a datum."""
    if isinstance(loss, PolicyLoss):
        loss.check_inputs(names)


def _read(what: str, kind: object, value: object) -> object:
    """`value` as an option of type `kind`: bool, float, one of several words, or a float that may be None."""
    if get_origin(kind) is UnionType:
        if value is None:
            return None
        (kind,) = (member for member in get_args(kind) if member is not type(None))
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{what} is one of {', '.join(get_args(kind))}, got {value!r}")
        return value
    if kind is bool:
        if value not in (0, 1):
            raise ValueError(f"{what} is true or false, got {value!r}")
        return bool(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{what} is a number, got {value!r}")
    return float(value)
