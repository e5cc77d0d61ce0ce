"""`python -m xorl.server.worker --config FILE`, started by torchrun: one rank of the service.

The launcher of the service says where the first one listens (--bind); started by hand, on one host or several, the
configuration does, and the launcher is told to connect.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from xorl.config import ServerConfig, load_server_config
from xorl.config.overrides import split_overrides
from xorl.core import runtime
from xorl.host.temporary import temporary_folder
from xorl.server.addresses import bind_address, channel_keys, publish
from xorl.server.channel import BlockingServer, ChannelKeys
from xorl.server.messages import Cancel, Work
from xorl.server.process import begin_process
from xorl.server.supervise import BAD_INPUT
from xorl.server.worker.base import build_base
from xorl.server.worker.selftest import self_test
from xorl.server.worker.serve import Cancelled, follow, lead
from xorl.server.worker.worker import Worker
from xorl.train.sync import match_receivers

logger = logging.getLogger(__name__)

ALIKE_S = 3.0
# Niceness of workers that compute on the cores that the API and the orchestrator run on.
YIELDING = 10


def run(config: ServerConfig, address: str, keys: ChannelKeys | None) -> None:
    """Build this rank's part of the model and serve until rank 0 is asked to shut down; collective."""
    server, cancelled = None, Cancelled()
    if runtime.global_rank() == 0:
        # Listening before the model is there says that it is on its way; what is asked meanwhile waits.
        server = BlockingServer(address, Work | Cancel, keys=keys, aside=cancelled.take)
        publish(config, server.address)
    match_receivers()
    place = runtime.init()
    if place.device.type == "cpu":
        # Requests are to be acknowledged while all cores compute.
        os.nice(YIELDING)
    worker = Worker(build_base(config, place))
    if config.enable_self_test:
        self_test(worker)
    logger.info("event=worker_ready rank=%d world_size=%d device=%s", place.rank, place.world_size, place.device)
    if server is None:
        follow(worker)
    else:
        lead(worker, server, cancelled)
        server.close()
    runtime.shutdown()


@contextmanager
def socket_folder() -> Iterator[Path | None]:
    """A folder for the first worker's socket, where all are on one host; it goes also with SIGTERM."""
    if runtime.num_hosts() > 1:
        yield None
        return
    with temporary_folder() as folder:
        owner = os.getpid()

        def end(number: int, frame: object) -> None:
            # What it forks inherits this.
            if os.getpid() == owner:
                shutil.rmtree(folder.path, ignore_errors=True)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        signal.signal(signal.SIGTERM, end)
        yield folder.path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m xorl.server.worker", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the service")
    parser.add_argument("--bind", help="address that rank 0 listens on [as the configuration says]")
    parser.add_argument("--keys", type=Path, help="file with the keys of that channel [in output_dir]")
    overrides, rest = split_overrides(sys.argv[1:] if arguments is None else arguments)
    flags = parser.parse_args(rest)
    try:
        config = load_server_config(flags.config, overrides).config
        # What all ranks do alike, the first one says for all.
        is_spoken_for = runtime.global_rank() > 0 and config.log_level == "INFO"
        begin_process(f"worker{runtime.global_rank()}", "WARNING" if is_spoken_for else config.log_level)
        if flags.bind is not None:
            run(config, flags.bind, None if flags.keys is None else ChannelKeys.load(flags.keys))
        elif runtime.global_rank() == 0:
            with socket_folder() as folder:
                address = bind_address(config, folder)
                run(config, address, channel_keys(config, address))
        else:
            run(config, "", None)
    except ValueError as error:
        if runtime.global_rank() != 0:
            # Mostly all ranks fail alike. Then the first says it and ends, and the others are ended before they do.
            time.sleep(ALIKE_S)
        sys.stderr.write(f"error: {error}\n")
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
