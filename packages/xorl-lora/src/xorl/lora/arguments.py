"""Checks of the types of arguments, at the public doors of this package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real


def check_integer(argument: str, value: object, *, at_least: int | None = None) -> None:
    """Raise ValueError unless `value` is an integer, and of at least `at_least` if that is not None."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{argument} must be an integer, got {value!r}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{argument} must be at least {at_least}, got {value}")


def check_number(argument: str, value: object) -> None:
    """Raise ValueError unless `value` is a finite number; ranges are for the caller to check."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{argument} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{argument} must be a finite number, got {value}")


def check_names(argument: str, value: object) -> None:
    """Raise ValueError unless `value` is a sequence of names; a string is one name, not a sequence of them."""
    if isinstance(value, str):
        raise ValueError(f"{argument} must be a tuple of names, got the string {value!r}: write ({value!r},)")
    if not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{argument} must be a tuple of names, got {value!r}")


def check_instance(argument: str, value: object, wanted: type) -> None:
    """Raise ValueError unless `value` is a `wanted`."""
    if not isinstance(value, wanted):
        raise ValueError(f"{argument} must be a {_full_name(wanted)}, got a {_full_name(type(value))}")


def _full_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
