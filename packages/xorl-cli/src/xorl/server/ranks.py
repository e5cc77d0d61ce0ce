"""`python -m xorl.server.ranks N ARGUMENT...`: runs N ranks of `python ARGUMENT...` on this host.

Returns the exit code of the first failed rank, so that the caller can distinguish bad input from a crash.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from xorl.core.launched import store_in
from xorl.host.ranks import Nodes, Ranks
from xorl.host.temporary import temporary_folder
from xorl.server.process import PARENT_VARIABLE
from xorl.server.supervise import BAD_INPUT

BY_SIGNAL = 128


def run(num_ranks: int, arguments: Sequence[str]) -> int:
    """Start the ranks, forward signals to them, wait for them to end, and return the exit code."""
    stops: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stops.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, stop)
    with temporary_folder() as folder:
        try:
            variables = {PARENT_VARIABLE: str(os.getpid()), **store_in(folder.path)}
        except ValueError as error:
            sys.stderr.write(f"error: {error}\n")
            return BAD_INPUT
        with Ranks(arguments, Nodes(num_ranks), variables, folder.path) as ranks:
            exits = ranks.wait(stops)
        if ranks.stopped_by:
            return BY_SIGNAL + ranks.stopped_by
        if not exits:
            return 0
        code = exits[0].exit_code
        return BY_SIGNAL - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
