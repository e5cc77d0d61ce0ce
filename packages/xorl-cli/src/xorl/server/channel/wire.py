"""Shared by both ends of a channel: frames, limits, errors, and the check of addresses.

Requests and answers consist of two frames, a header and a body. The header has the sender's version and is decoded
before the body, so that two incompatible versions can still report their mismatch.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from xorl.server.channel.keys import ChannelKeys
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
_decode_header = msgspec.msgpack.Decoder(Header).decode


def encode_header(kind: Kind, number: int = 0, incarnation: str = "") -> bytes:
    """An encoded header with this version."""
    return _encode(Header(PROTOCOL_VERSION, kind, number, incarnation))


def decode_header(frame: bytes) -> Header:
    """Decode a header. Raises msgspec.MsgspecError if the frame is not a header."""
    return _decode_header(frame)


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
