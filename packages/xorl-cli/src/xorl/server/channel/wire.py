"""Shared by both ends of a channel: frames, limits, keys, errors, and the check of addresses.

Requests and answers consist of two frames, a header and a body. The header has the sender's version and is decoded
before the body, so that two incompatible versions can still report their mismatch.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from xorl.server.messages import PROTOCOL_VERSION

Kind = Literal["request", "answer", "refusal", "ping", "pong"]
# sockaddr_un has room for 108 bytes including the terminating zero.
MAX_IPC_PATH_BYTES = 107


class ChannelError(RuntimeError):
    """The other side refused the request or could not answer it."""


class PeerLost(ConnectionError):
    """The other side is gone or was replaced; a sent request may or may not have been executed."""


class VersionMismatch(ChannelError):
    """The two sides use different versions of the protocol."""


@dataclass(frozen=True)
class Limits:
    """Limits and intervals of a channel.

    Attributes:
        message_bytes: the maximum length of a frame.
        num_pending: the maximum number of requests that a server has not answered yet; more are refused.
        ping_every_s: the interval of a client's pings.
        lost_after_s: a server that is silent for this long is lost.
    """

    message_bytes: int = 512 * 2**20
    num_pending: int = 16384
    ping_every_s: float = 1.0
    lost_after_s: float = 15.0


@dataclass(frozen=True)
class ChannelKeys:
    """CURVE key pairs of both sides, in Z85: they encrypt a channel, and only processes that have them can connect.

    Both sides read all four keys from a file that only their user can read.
    """

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


class Header(msgspec.Struct, frozen=True):
    """The first frame of each message. Unlike in other messages, unknown fields are allowed: a later version may have
    more fields, and its version number must still be readable.

    number: the number of a client's request; the answer repeats it. incarnation: a random name that each server takes
    at its start; if it changes, the client knows that its pending requests are lost.
    """

    version: int
    kind: Kind
    number: int = 0
    incarnation: str = ""


_encode = msgspec.msgpack.Encoder().encode
decode_header = msgspec.msgpack.Decoder(Header).decode


def encode_header(kind: Kind, number: int = 0, incarnation: str = "") -> bytes:
    """An encoded header with this version."""
    return _encode(Header(PROTOCOL_VERSION, kind, number, incarnation))


def version_text(ours: str, theirs: str, their_version: int) -> str:
    """The error message for a version mismatch, on either side."""
    return (
        f"the {ours} uses version {PROTOCOL_VERSION} of the service's messages and the {theirs} version "
        f"{their_version}: install the same xorl-cli for both and restart both"
    )


def check_address(address: str, keys: ChannelKeys | None) -> None:
    """Raise ValueError for an invalid address, and for a tcp address that other machines can reach without keys."""
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in ("ipc", "tcp") or not rest:
        raise ValueError(f"an address must be ipc://PATH or tcp://HOST:PORT, got {address!r}")
    if scheme == "ipc":
        if len(os.fsencode(rest)) > MAX_IPC_PATH_BYTES:
            raise ValueError(
                f"the path of an ipc address must have at most {MAX_IPC_PATH_BYTES} bytes, got {address!r}"
            )
        return
    host = rest.rpartition(":")[0].strip("[]")
    if keys is None and not is_loopback(host):
        raise ValueError(
            f"{address} can be reached from other machines, and a channel without keys accepts requests from anyone: "
            "use 127.0.0.1 or pass the same ChannelKeys to both sides"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host; False for all names other than localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_socket(context: zmq.asyncio.Context, kind: int, limits: Limits) -> zmq.asyncio.Socket:
    """A socket that rejects frames beyond the limit and does not delay the end of the process."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.message_bytes)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket
