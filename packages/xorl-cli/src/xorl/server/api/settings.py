"""What the API process is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from xorl.server.channel import ChannelKeys, Limits
from xorl.server.channel.wire import is_loopback


@dataclass(frozen=True)
class ApiSettings:
    """Where the API listens, whom it asks, and its limits.

    orchestrator: its address. token: what clients must send; None only where nobody else can connect. body_bytes: the
    longest body, also once it is decompressed and sparse tensors are dense. bytes_in_flight: of all bodies that are
    read at once. poll_s: how long an answer to a poll is waited for. patience_s: how long a request waits for an
    orchestrator that is started again, before the client is told to come back.
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
        # An operation is about as long as its body; the rest of a message is far below a tenth.
        longest = Limits().message_bytes * 9 // 10
        if not 0 < self.body_bytes <= longest:
            raise ValueError(f"max_request_mb must be above 0 and at most {longest // 10**6}, which one message holds")
        if not 0 < self.poll_s <= 30:
            raise ValueError(f"poll_s is above 0 and at most 30, which clients and proxies wait for; got {self.poll_s}")
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from other machines: set api_token, or listen at 127.0.0.1"
            )
        if self.token is not None and len(self.token) < 16:
            raise ValueError("api_token has fewer than 16 characters: take a long random one")
