"""JSON responses, and refusals: error responses that both clients understand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import msgspec
from starlette.responses import Response

from xorl.server.context_length import ContextOverflow

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


class Refusal(Exception):
    """An HTTP error with a status and message. 4xx except 408 and 429, and 507, are final; clients retry others.

    code, param: for OpenAI's clients, the kind of the error and the invalid parameter.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    @property
    def is_final(self) -> bool:
        """Whether clients must not retry the request."""
        return (400 <= self.status < 500 and self.status not in (408, 429)) or self.status == 507

    def response(self, path: str = "") -> Response:
        """The response. xorl-client shows its `detail`, tinker the body, OpenAI's client the `error` under /v1."""
        headers = {"x-should-retry": "false" if self.is_final else "true"}
        if self.status in (429, 503):
            headers["retry-after"] = "1"
        content: JSON = openai_error(self) if path.startswith("/v1/") else {"detail": self.message}
        return json_response(content, self.status, headers)


def no_request(request_id: str) -> Refusal:
    """The refusal of a call for a request that does not exist."""
    return Refusal(404, f"there is no request {request_id[:100]}")


# The codes of OpenAI's errors, by status, for refusals without a code of their own.
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


def openai_error(refusal: Refusal) -> dict[str, JSON]:
    """The body of a refusal for OpenAI's client."""
    return {
        "error": {
            "message": refusal.message,
            "type": "invalid_request_error" if refusal.status < 500 else "server_error",
            "param": refusal.param,
            "code": refusal.code or _CODES.get(refusal.status),
        }
    }


class InvalidField(ValueError):
    """A field of a request that is invalid. code: the kind of the error, as OpenAI's clients know it."""

    def __init__(self, name: str, problem: str, code: str = "invalid_value") -> None:
        super().__init__(f"{name} {problem}")
        self.name = name
        self.code = code


@contextmanager
def refuse_invalid() -> Iterator[None]:
    """Turn a ValueError, which a client's input caused, into Refusal(400)."""
    try:
        yield
    except InvalidField as problem:
        raise Refusal(400, str(problem), code=problem.code, param=problem.name) from None
    except ContextOverflow as problem:
        raise Refusal(400, str(problem), code=problem.code) from None
    except ValueError as problem:
        raise Refusal(400, str(problem)) from None
