"""Checks of arguments at public doors; what is inside relies on them."""

from typing import get_args


def check_choice(argument: str, value: object, choices: object) -> None:
    """Raise ValueError unless `value` is one of `choices`, a `Literal`."""
    known = get_args(choices)
    if value not in known:
        raise ValueError(f"{argument}: {value!r} is not one of {', '.join(map(repr, known))}")
