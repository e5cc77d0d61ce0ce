"""Checks of arguments at public doors, by their annotations; what is inside relies on them.

Only types, closed sets and lower limits are checked here. Whether arguments fit each other is checked at the doors.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from types import UnionType
from typing import Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from xorl.data.errors import DataError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# What is accepted for a type, if it is more than the type itself.
_ACCEPTED: Mapping[object, tuple[type, ...]] = {
    int: (int, np.integer),
    float: (int, float, np.integer),
    Path: (str, os.PathLike),
}
_SHOWN_CHARS = 80


def checked(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a public function: an argument that is not of its annotated type raises DataError."""
    signature = inspect.signature(function)

    @wraps(function)
    def check_and_call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        hints = _hints(function)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            check_type(name, value, hints.get(name, object))
        return function(*args, **kwargs)

    return check_and_call


def convert_fields_(options: object) -> None:
    """Converts fields of a dataclass to their types: text to paths, paths to text, NumPy's integers to Python's."""
    for name, hint in _hints(type(options)).items():
        value, parts = getattr(options, name), _parts(hint)
        if isinstance(value, np.integer) and (int in parts or float in parts):
            object.__setattr__(options, name, int(value))
        elif isinstance(value, os.PathLike) and str in parts:
            object.__setattr__(options, name, os.fspath(value))
        elif isinstance(value, str) and Path in parts:
            object.__setattr__(options, name, Path(value))
        elif isinstance(value, (tuple, list)) and Sequence[str] in parts:
            paths = [os.fspath(member) if isinstance(member, os.PathLike) else member for member in value]
            object.__setattr__(options, name, type(value)(paths))


def check_fields(options: object, prefix: str = "") -> None:
    """Raises DataError for a field of a dataclass that is not of its type; `prefix` stands before the field's name."""
    for name, hint in _hints(type(options)).items():
        check_type(f"{prefix}{name}", getattr(options, name), hint)


def check_at_least(minimum: int, **arguments: int | None) -> None:
    """Raises DataError for an argument below `minimum`."""
    for name, value in arguments.items():
        if value is not None and value < minimum:
            raise DataError(f"{name}: {value}, want at least {minimum}")


def check_type(argument: str, value: object, hint: object) -> None:
    """Raises DataError unless `value` is of the type `hint`.

    NumPy's integers pass for Python's, integers for numbers, text for a path, and every sequence for a tuple. Protocols
    are not checked, and neither are the members of sequences of integers, which may be long.
    """
    parts = _parts(hint)
    if any(_is_of(value, part) for part in parts):
        return
    choices = [str(choice) for part in parts if get_origin(part) is Literal for choice in get_args(part)]
    if choices and isinstance(value, str):
        raise DataError(f"{argument}: {value!r} is not one of {', '.join(choices)}")
    for part in parts:
        if _is_sequence(part) and isinstance(value, Sequence) and not isinstance(value, str):
            for index, member in enumerate(value):
                check_type(f"{argument}[{index}]", member, get_args(part)[0])
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
    kind = "" if value is None else f" is {type(value).__name__}"
    raise DataError(f"{argument}: {shown}{kind}, want {' or '.join(map(_described, parts))}")


@cache
def _hints(annotated: object) -> Mapping[str, object]:
    return get_type_hints(annotated)


def _parts(hint: object) -> tuple[object, ...]:
    """The members of a union; of any other type, the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_of(value: object, part: object) -> bool:
    origin, members = get_origin(part), get_args(part)
    if origin is Literal:
        return isinstance(value, str) and value in members
    if _is_sequence(part):
        return (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and (members[0] is int or all(any(_is_of(each, kind) for kind in _parts(members[0])) for each in value))
        )
    kind = origin or part
    if not isinstance(kind, type):
        return True
    if isinstance(value, bool) and kind is not object:
        return kind is bool
    try:
        return isinstance(value, _ACCEPTED.get(kind, kind))
    except TypeError:  # a protocol
        return True


def _is_sequence(part: object) -> bool:
    return get_origin(part) in (tuple, Sequence)


def _described(part: object) -> str:
    if part is Path:
        return "a path"
    if _is_sequence(part):
        return f"a list of {' or '.join(map(_described, _parts(get_args(part)[0])))}"
    kind = get_origin(part) or part
    return "None" if part is type(None) else str(getattr(kind, "__name__", kind))
