"""Refusal: an error response that both clients understand."""

from __future__ import annotations

from starlette.responses import Response

from xorl.server.api.reply import json_response


class Refusal(Exception):
    """An HTTP error with a status and message. 4xx except 408 and 429, and 507, are final; clients retry others."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    @property
    def is_final(self) -> bool:
        """Whether clients must not retry the request."""
        return (400 <= self.status < 500 and self.status not in (408, 429)) or self.status == 507

    def response(self) -> Response:
        """The response. xorl-client shows its `detail`, tinker the whole body."""
        headers = {"x-should-retry": "false" if self.is_final else "true"}
        if self.status in (429, 503):
            headers["retry-after"] = "1"
        return json_response({"detail": self.message}, self.status, headers)
