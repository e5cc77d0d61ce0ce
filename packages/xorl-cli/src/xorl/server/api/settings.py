"""The settings of the API process."""

from __future__ import annotations

from dataclasses import dataclass, field

from xorl.server.channel import ChannelKeys, Limits
from xorl.server.channel.wire import is_loopback


@dataclass(frozen=True)
class ApiSettings:
    """Addresses, keys and limits of the API process.

    Attributes:
        orchestrator: its address.
        host: the address that the API listens on.
        token: the API token that clients must send; None is allowed only if the host is a loopback address.
        keys: the keys of the channel to the orchestrator.
        body_bytes: the maximum length of a body, also after decompression and after sparse tensors are made dense.
        bytes_in_flight: the maximum length of all bodies that are being read at once.
        poll_s: how long a poll waits for the result.
        patience_s: how long a request waits for a restarting orchestrator before it is answered with 503.
    """

    orchestrator: str
    host: str = "127.0.0.1"
    port: int = 5555
    token: str | None = field(default=None, repr=False)
    keys: ChannelKeys | None = None
    body_bytes: int = 256 * 2**20
    bytes_in_flight: int = 2 * 2**30
    poll_s: float = 25.0
    patience_s: float = 30.0

    def __post_init__(self) -> None:
        # An operation is about as long as its body, and the rest of a message is far below a tenth of it.
        longest = Limits().message_bytes * 9 // 10
        if not 0 < self.body_bytes <= longest:
            raise ValueError(f"max_request_mb must be above 0 and at most {longest // 10**6}, the limit of a message")
        if not 0 < self.poll_s <= 30:
            raise ValueError(
                f"poll_s must be above 0 and at most 30, so that clients do not time out; got {self.poll_s}"
            )
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from other machines: set api_token, or use host 127.0.0.1"
            )
        if self.token is not None and len(self.token) < 16:
            raise ValueError("api_token has fewer than 16 characters: use a long random one")
