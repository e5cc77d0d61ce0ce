"""Checks of arguments at public doors; what is inside relies on them."""

import math
from typing import get_args


def check_choice(argument: str, value: object, choices: object) -> None:
    """Raise ValueError unless `value` is one of `choices`, a `Literal`."""
    known = get_args(choices)
    if value not in known:
        raise ValueError(f"{argument}: {value!r} is not one of {', '.join(map(repr, known))}")


def check_number(argument: str, value: object, *, least: float = 0.0) -> None:
    """Raise ValueError unless `value` is a finite number of at least `least`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < least:
        raise ValueError(f"{argument}: must be a number of at least {least:g}, got {value!r}")
