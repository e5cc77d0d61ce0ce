"""free_port: where a test's own server can listen."""

import os
import random
import socket
from itertools import count

# Below the ports that systems give to outgoing connections, which may take one before its user listens.
FIRST, PER_PROCESS = 20_000, 2_000
_candidates = count(random.randrange(PER_PROCESS))


def free_port() -> int:
    """A port of this host that nobody has, in a range of this pytest process, each in turn."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 6
    while True:
        port = FIRST + worker * PER_PROCESS + next(_candidates) % PER_PROCESS
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
