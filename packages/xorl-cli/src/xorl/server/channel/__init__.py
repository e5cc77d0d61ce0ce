"""Typed requests and answers between the service's processes over ZMQ. Messages are msgpack and never unpickled."""

from xorl.server.channel.blocking import BlockingServer, Received
from xorl.server.channel.client import ChannelClient
from xorl.server.channel.server import ChannelServer
from xorl.server.channel.wire import (
    ChannelError,
    ChannelKeys,
    Limits,
    PeerLost,
    VersionMismatch,
    check_address,
)

__all__ = [
    "BlockingServer",
    "ChannelClient",
    "ChannelError",
    "ChannelKeys",
    "ChannelServer",
    "Limits",
    "PeerLost",
    "Received",
    "VersionMismatch",
    "check_address",
]
