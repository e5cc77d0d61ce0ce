"""JSON responses. Non-finite numbers are written as NaN and Infinity, which Python's JSON parser accepts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec
from starlette.responses import Response

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"


class Floats(list[float]):
    """A long list of numbers whose sum cannot overflow, which makes the check for non-finite values fast."""


_encode = msgspec.json.Encoder().encode


def json_response(content: JSON, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`content` as a JSON response; non-finite numbers become NaN and Infinity."""
    # msgspec's encoder would write null, which clients reject as a number.
    body = _encode(content) if _is_finite(content) else json.dumps(content).encode()
    return Response(body, status, headers, media_type="application/json")


def _is_finite(content: JSON) -> bool:
    if isinstance(content, float):
        return math.isfinite(content)
    if isinstance(content, Mapping):
        return all(_is_finite(value) for value in content.values())
    if isinstance(content, Floats):
        # The sum is non-finite if any number is, and is much faster than a loop.
        return math.isfinite(sum(content))
    return not isinstance(content, list | tuple) or all(map(_is_finite, content))
