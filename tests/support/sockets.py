"""Sockets of channels for as long as a test needs them."""

from collections.abc import Iterator
from contextlib import contextmanager

from xorl.host.temporary import temporary_folder


@contextmanager
def ipc_address(name: str) -> Iterator[str]:
    """A new address in a private folder, which goes at the end."""
    with temporary_folder() as folder:
        yield f"ipc://{folder.path / name}"
