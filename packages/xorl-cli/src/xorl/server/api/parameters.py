"""Reads groups of parameters, such as sampling_params. Unknown names are refused, since each may change a result."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from xorl.server.api.openai_fields import field_names, msgspec_of
from xorl.server.api.responses import InvalidField

Parameters = TypeVar("Parameters", bound=msgspec.Struct)


def read_parameters(given: Mapping[str, object], kind: type[Parameters], where: str) -> Parameters:
    """The parameters in `given`. Raises InvalidField for a wrong type, and for an unknown name.

    An unknown name is ignored if its value requests nothing (null, false, 0 or empty): newer releases of clients send
    the defaults of parameters that did not exist when this was written.
    """
    known = field_names(kind)
    for name, value in given.items():
        if name not in known and value:
            near = difflib.get_close_matches(name[:100], known, n=1)
            advice = f"did you mean {near[0]}?" if near else "leave it out"
            raise InvalidField(f"{where}.{name[:100]}", f"is not a parameter of this call: {advice}")
    return msgspec_of({name: value for name, value in given.items() if name in known}, kind, f"{where}.")
