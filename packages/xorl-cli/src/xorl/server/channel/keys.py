"""CURVE keys of a channel: they encrypt it, and only processes that have them can connect."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio


@dataclass(frozen=True)
class ChannelKeys:
    """The key pairs of both sides, in Z85. Both ends have all four keys, from a file that only their user can read."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)

    @classmethod
    def create(cls) -> ChannelKeys:
        """Create new keys."""
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    def save(self, path: Path) -> None:
        """Write the keys to a file that only this user can read; replaces an existing file."""
        parts = (self.server_public, self.server_secret, self.client_public, self.client_secret)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(handle, "wb") as file:
            file.write(msgspec.json.encode([part.decode() for part in parts]))
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> ChannelKeys:
        """Read the keys that `save` wrote. Raises ValueError if the file is invalid or if other users can access it."""
        if path.stat().st_mode & 0o077:
            raise ValueError(
                f"{path} holds secret keys and other users can read it: chmod 600 {path}, or create new keys"
            )
        try:
            server_public, server_secret, client_public, client_secret = (
                part.encode() for part in msgspec.json.decode(path.read_bytes(), type=tuple[str, str, str, str])
            )
        except msgspec.MsgspecError as problem:
            raise ValueError(f"{path} does not contain channel keys: {problem}") from None
        return cls(server_public, server_secret, client_public, client_secret)

    def protect_server_(self, socket: zmq.asyncio.Socket) -> None:
        """Set the keys of a server's socket before it binds. An authenticator must check the clients' keys."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.server_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.server_secret)

    def protect_client_(self, socket: zmq.asyncio.Socket) -> None:
        """Set the keys of a client's socket before it connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.client_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.client_secret)
