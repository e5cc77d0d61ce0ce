"""`python -m xorl.server.ranks N ARGUMENT...`: runs N ranks of `python ARGUMENT...` on this host, as torchrun does.

Unlike torchrun, which always fails with 1, it returns the exit code of the first failed rank, so that the caller can
tell bad input from a crash.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from xorl.host.temporary import temporary_folder
from xorl.server.process import PARENT_VARIABLE

BY_SIGNAL = 128


def run(num_ranks: int, arguments: Sequence[str]) -> int:
    """Start the ranks, forward signals to them, wait for them to end, and return the exit code."""
    # A failed rank has already logged its error.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if num_ranks > 1:
        # As torchrun does, so that ranks do not compete for cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    with temporary_folder() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            role="rank",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder.path)),
            local_addr="localhost",
        )
        try:
            elastic_launch(config, sys.executable)("-u", *arguments)
        except ChildFailedError as error:
            _, first = error.get_first_failure()
            return BY_SIGNAL - first.exitcode if first.exitcode < 0 else first.exitcode
        except SignalException as error:
            return BY_SIGNAL + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
