"""Sockets of channels for as long as a test needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from xorl.server.channel import private_ipc_address, remove_private


@contextmanager
def ipc_address(name: str) -> Iterator[str]:
    """A new `private_ipc_address`, whose folder goes at the end."""
    address = private_ipc_address(name)
    try:
        yield address
    finally:
        remove_private(address)
