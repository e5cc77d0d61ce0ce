"""What the API process is told when it starts, by a file that only this user can read."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from xorl.server.channel import ChannelKeys, Limits
from xorl.server.channel.wire import is_loopback


class ApiSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the API listens, whom it asks, and its limits.

    token: what clients must send; None only where nobody else can connect. body_bytes: the longest body, also once
    it is decompressed and sparse tensors are dense. bytes_in_flight: of all bodies that are read at once. poll_s: how
    long an answer to a poll is waited for. patience_s: how long a request waits for an orchestrator that is started
    again, before the client is told to come back.
    """

    orchestrator: str
    host: str = "127.0.0.1"
    port: int = 5555
    token: str | None = None
    keys_file: str | None = None
    log_level: str = "INFO"
    body_bytes: int = 256 * 2**20
    bytes_in_flight: int = 2 * 2**30
    poll_s: float = 25.0
    patience_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.poll_s <= 30:
            raise ValueError(f"poll_s is above 0 and at most 30, which clients and proxies wait for; got {self.poll_s}")
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from other machines: set a token, which begins with tml- so that "
                "both clients take it, or listen at 127.0.0.1"
            )
        if self.token is not None and len(self.token) < 16:
            raise ValueError("the token has fewer than 16 characters: take a long random one")

    @property
    def channel_limits(self) -> Limits:
        """Messages are a little longer than the bodies that they are made of."""
        return Limits(message_bytes=2 * self.body_bytes)

    def keys(self) -> ChannelKeys | None:
        """Those of the channel to the orchestrator, if it has any."""
        return None if self.keys_file is None else ChannelKeys.load(Path(self.keys_file))

    def save(self, path: Path) -> None:
        """Write them for `load`, readable for this user alone: the token is in them."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(msgspec.json.encode(self))

    @classmethod
    def load(cls, path: Path) -> ApiSettings:
        """What `save` wrote; ValueError for anything else."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.MsgspecError as problem:
            raise ValueError(f"{path} holds no settings of the API: {problem}") from None
