"""CURVE keys of a channel: who has them may speak on it, encrypted; nobody else gets in."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio


@dataclass(frozen=True)
class ChannelKeys:
    """The key pairs of both sides, in Z85. Both ends of a channel hold the same four, by a file only they can read."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)

    @classmethod
    def create(cls) -> ChannelKeys:
        """New ones."""
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    def save(self, path: Path) -> None:
        """Write them, readable for this user alone, in place of what is there."""
        parts = (self.server_public, self.server_secret, self.client_public, self.client_secret)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(handle, "wb") as file:
            file.write(msgspec.json.encode([part.decode() for part in parts]))
        fresh.replace(path)

    @classmethod
    def load(cls, path: Path) -> ChannelKeys:
        """What `save` wrote; ValueError for anything else, and where others may read it."""
        if path.stat().st_mode & 0o077:
            raise ValueError(f"{path} holds secret keys and others may read it: chmod 600 {path}, or make new ones")
        try:
            server_public, server_secret, client_public, client_secret = (
                part.encode() for part in msgspec.json.decode(path.read_bytes(), type=tuple[str, str, str, str])
            )
        except msgspec.MsgspecError as problem:
            raise ValueError(f"{path} holds no channel keys: {problem}") from None
        return cls(server_public, server_secret, client_public, client_secret)

    def protect_server_(self, socket: zmq.asyncio.Socket) -> None:
        """Before it binds. Which clients are let in, an authenticator says."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.server_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.server_secret)

    def protect_client_(self, socket: zmq.asyncio.Socket) -> None:
        """Before it connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.client_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.client_secret)
