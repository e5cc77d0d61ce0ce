"""The table of losses by name, and parsing of their options."""

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


def get_loss(name: str, options: Mapping[str, object] = MappingProxyType({})) -> HeadLoss:
    """Return the loss `name` with these options; missing options have their defaults.

    Booleans may also be 0 and 1, because one of the service's protocols can send only numbers.

    Raises:
        ValueError: the loss or option does not exist, or the value is invalid.
    """
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}; choose one of {', '.join(LOSSES)}")
    loss = LOSSES[name]
    known = get_type_hints(type(loss.options)) if isinstance(loss, PolicyLoss) else {}
    unknown = sorted(set(options) - set(known))
    if unknown:
        available = f"its options are {', '.join(sorted(known))}" if known else "it has no options"
        raise ValueError(f"loss {name!r} has no option {unknown[0]!r}; {available}")
    if not isinstance(loss, PolicyLoss):
        return loss
    values = {key: _parse_option(f"loss {name!r}: option {key!r}", known[key], value) for key, value in options.items()}
    try:
        return replace(loss, options=replace(loss.options, **values))
    except ValueError as problem:
        raise ValueError(f"loss {name!r}: {problem}") from None


def check_inputs(loss: HeadLoss, names: Collection[str]) -> None:
    """Raise ValueError if the loss needs an input that is not among `names`, the fields of a datum."""
    if isinstance(loss, PolicyLoss):
        loss.check_inputs(names)


def _parse_option(name_in_errors: str, kind: object, value: object) -> object:
    """Convert `value` to the option's type: bool, float, a Literal, or float | None."""
    if get_origin(kind) is UnionType:
        if value is None:
            return None
        (kind,) = (member for member in get_args(kind) if member is not type(None))
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name_in_errors} must be one of {', '.join(get_args(kind))}, got {value!r}")
        return value
    if kind is bool:
        if value not in (0, 1):
            raise ValueError(f"{name_in_errors} must be true or false, got {value!r}")
        return bool(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name_in_errors} must be a number, got {value!r}")
    return float(value)
