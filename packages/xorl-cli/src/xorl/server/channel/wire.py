"""What both ends of a channel share: frames, limits, errors, and which addresses may be used without keys.

A request is two frames, a header and a body; so is its answer. The header says the sender's version before anything
of the body is looked at, so that two versions can still tell each other that they differ.
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
# sockaddr_un has room for 108 bytes with the closing zero.
MAX_IPC_PATH_BYTES = 107


class ChannelError(RuntimeError):
    """The other side could not answer, and says why."""


class PeerLost(ConnectionError):
    """The other side is gone, or was replaced: what was asked may or may not have been done."""


class VersionMismatch(ChannelError):
    """The two sides speak different versions."""


@dataclass(frozen=True)
class Limits:
    """message_bytes: the longest frame. num_pending: requests that a server has not answered yet; more are refused.

    ping_every_s: how often a client asks whether the server is there; it is lost after lost_after_s without a sign.
    """

    message_bytes: int = 512 * 2**20
    num_pending: int = 16384
    ping_every_s: float = 1.0
    lost_after_s: float = 15.0


class Header(msgspec.Struct, frozen=True):
    """Unknown fields are let through here alone: a later version may have more, and must still be told its number.

    number: of a client's request, which the answer repeats. incarnation: a random name that each server gets when it
    starts; a client that sees another one knows that what it waits for is lost.
    """

    version: int
    kind: Kind
    number: int = 0
    incarnation: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(Header).decode


def encode_header(kind: Kind, number: int = 0, incarnation: str = "") -> bytes:
    """A header of this version."""
    return _encode(Header(PROTOCOL_VERSION, kind, number, incarnation))


def decode_header(frame: bytes) -> Header:
    """Raises msgspec.MsgspecError where the frame is none."""
    return _decode_header(frame)


def version_text(ours: str, theirs: str, their_version: int) -> str:
    """What both sides of a mismatch say."""
    return (
        f"the {ours} speaks version {PROTOCOL_VERSION} of the service's messages and the {theirs} version "
        f"{their_version}: install the same xorl-cli for both and start both again"
    )


def check_address(address: str, keys: ChannelKeys | None) -> None:
    """Raise ValueError for an address that cannot be used, or not without keys: tcp beyond this machine."""
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in ("ipc", "tcp") or not rest:
        raise ValueError(f"an address is ipc://PATH or tcp://HOST:PORT, got {address!r}")
    if scheme == "ipc":
        if len(os.fsencode(rest)) > MAX_IPC_PATH_BYTES:
            raise ValueError(f"the path of an ipc address has at most {MAX_IPC_PATH_BYTES} bytes, got {address!r}")
        return
    host = rest.rpartition(":")[0].strip("[]")
    if keys is None and not is_loopback(host):
        raise ValueError(
            f"{address} can be reached from other machines, and a channel without keys takes requests from anybody: "
            "bind 127.0.0.1, or give both sides the same ChannelKeys"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address; names other than localhost are taken for others'."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_socket(context: zmq.asyncio.Context, kind: int, limits: Limits) -> zmq.asyncio.Socket:
    """A socket that neither takes longer frames nor holds up the end of the process."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.message_bytes)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket
