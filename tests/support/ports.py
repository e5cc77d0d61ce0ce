"""free_port: where a test's own server can listen."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of this host that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
