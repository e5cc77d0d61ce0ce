"""Refusal: why a request is not taken, as both clients read it."""

from __future__ import annotations

from starlette.responses import Response

from xorl.server.api.reply import json_response


class Refusal(Exception):
    """Answered with this HTTP status and message. 4xx but 408 and 429 are final, the others are tried again."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    @property
    def is_final(self) -> bool:
        """Whether the client will not send the same again."""
        return (400 <= self.status < 500 and self.status not in (408, 429)) or self.status == 507

    def response(self) -> Response:
        """`detail` is what one client shows, the whole body what the other does."""
        headers = {"x-should-retry": "false" if self.is_final else "true"}
        if self.status in (429, 503):
            headers["retry-after"] = "1"
        return json_response({"detail": self.message}, self.status, headers)
