"""Checks of arguments at public doors; what is inside relies on them."""

import math
import reprlib
from collections.abc import Sequence
from operator import index
from typing import get_args

import torch
from torch import Tensor


def check_choice(argument: str, value: object, choices: object) -> None:
    """Raise ValueError unless `value` is one of `choices`, a `Literal`."""
    known = get_args(choices)
    if value not in known:
        raise ValueError(f"{argument}: {value!r} is not one of {', '.join(map(repr, known))}")


def check_number(argument: str, value: object, *, least: float = 0.0) -> None:
    """Raise ValueError unless `value` is a finite number of at least `least`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < least:
        raise ValueError(f"{argument}: must be a number of at least {least:g}, got {value!r}")


def check_type(argument: str, value: object, kind: type, example: str) -> None:
    """Raise ValueError unless `value` is a `kind`; `example` shows one."""
    if not isinstance(value, kind):
        raise ValueError(f"{argument} must be a {kind.__name__}, such as {example}; got {_describe(value)}")


def check_floating(argument: str, dtype: object) -> None:
    """Raise ValueError unless `dtype` is a floating-point dtype."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{argument} must be a floating-point dtype, such as torch.bfloat16; got {_describe(dtype)}")


def check_device_type(device_type: object) -> None:
    """Raise ValueError unless `device_type` is one of torch's device types; a device with an index is none."""
    check_type("device_type", device_type, str, '"cpu"')
    try:
        known = torch.device(str(device_type)).type
    except RuntimeError:
        known = None
    if device_type != known:
        raise ValueError(f"device_type must be a device type, such as 'cpu' or 'cuda'; got {device_type!r}")


def check_at_least(argument: str, value: object, least: int, *, optional: bool = False) -> None:
    """Raise ValueError unless `value` is an integer of at least `least`, or None if it is optional."""
    if optional and value is None:
        return
    if not isinstance(value, int) or value < least:
        or_none = ", or None" if optional else ""
        raise ValueError(f"{argument} must be an integer of at least {least}{or_none}; got {_describe(value)}")


def check_one_device(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all `tensors` that are not None are on one device."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        *names, last = devices
        raise ValueError(
            f"{', '.join(names)} and {last} must be on one device; got {', '.join(map(str, devices.values()))}"
        )


def as_integers(argument: str, values: Sequence[int]) -> tuple[int, ...]:
    """The values as Python integers. Raises ValueError for others, such as 2.5."""
    try:
        return tuple(index(value) for value in values)
    except TypeError as error:
        raise ValueError(f"{argument} must be integers; got {_describe(values)}") from error


def is_readable(tensor: Tensor) -> bool:
    """Whether reading values of this tensor costs no wait for a device and does not break a trace."""
    # Fake tensors and other subclasses may have no values.
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _describe(value: object) -> str:
    return "None" if value is None else f"the {type(value).__name__} {reprlib.repr(value)}"
