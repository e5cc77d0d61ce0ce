"""JSON answers. Numbers that are not finite are written as Python's own parser reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec
from starlette.responses import Response

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"


class Floats(list[float]):
    """Many numbers, none of them as large as to overflow a sum; a list of anything is looked at one by one."""


_encode = msgspec.json.Encoder().encode


def json_response(content: JSON, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`content` as JSON, with NaN and Infinity where they are."""
    # The fast encoder would write null, which is no number to a client.
    body = _encode(content) if _is_finite(content) else json.dumps(content).encode()
    return Response(body, status, headers, media_type="application/json")


def _is_finite(content: JSON) -> bool:
    if isinstance(content, float):
        return math.isfinite(content)
    if isinstance(content, Mapping):
        return all(_is_finite(value) for value in content.values())
    if isinstance(content, Floats):
        # A sum is not finite where one of its numbers is not, and takes no time.
        return math.isfinite(sum(content))
    return not isinstance(content, list | tuple) or all(map(_is_finite, content))
