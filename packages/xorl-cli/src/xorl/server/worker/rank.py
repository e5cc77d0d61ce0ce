"""One rank of the service: `python -m xorl.server.worker --config FILE`.

The service's launcher passes the address that rank 0 listens on (--bind). If the workers are started by hand, on one
or several hosts, rank 0 takes the address from the configuration and publishes it for the launcher to connect to.
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
from datetime import timedelta
from pathlib import Path

from xorl.config import ServerConfig, load_server_config
from xorl.config.overrides import split_overrides
from xorl.config.server_training import in_server_terms
from xorl.core.join import Peers, rendezvous
from xorl.core.runtime import global_rank, init, is_launched, num_hosts, set_timeouts, shutdown, world_size
from xorl.host.temporary import temporary_folder
from xorl.server.addresses import bind_address, channel_keys, publish
from xorl.server.channel import BlockingServer, ChannelKeys
from xorl.server.messages import Cancel, Work
from xorl.server.process import configure_logging, follow_parent
from xorl.server.supervise import BAD_INPUT
from xorl.server.worker.base import build_base
from xorl.server.worker.selftest import self_test
from xorl.server.worker.serve import CancelledIds, follow, lead
from xorl.server.worker.watch import collective_timeout_s, idle_s, signs_of_life, watchdog_of
from xorl.server.worker.worker import Worker
from xorl.train.sync import let_nccl_reach, match_sglang_nccl
from xorl.train.watchdog import Position

logger = logging.getLogger(__name__)

# How long other ranks wait for rank 0 to report an error that all ranks have.
ERROR_DELAY_S = 3.0
# Niceness of CPU workers, which share their cores with the API and the orchestrator.
CPU_NICENESS = 10


def run(config: ServerConfig, address: str, keys: ChannelKeys | None, signs: Path | None = None) -> None:
    """Build this rank's part of the model and serve until rank 0 is asked to shut down; collective.

    signs: the launcher's folder for signs of life.
    """
    with signs_of_life(config, signs):
        _run(config, address, keys, signs)


def _run(config: ServerConfig, address: str, keys: ChannelKeys | None, signs: Path | None) -> None:
    position = Position(step=None)
    watchdog = watchdog_of(config, signs, position)
    server, cancelled = None, CancelledIds()
    if global_rank() == 0:
        # Listen before the model is built, so that the orchestrator sees the workers start; its requests wait.
        server = BlockingServer(address, Work | Cancel, keys=keys, intercept=cancelled.intercept)
        publish(config, server.address)
    match_sglang_nccl()
    if num_hosts() == 1:  # on several hosts, NCCL chooses an interface that reaches other hosts anyway
        let_nccl_reach(endpoint.host for endpoint in config.inference_endpoints)
    peers = rendezvous(global_rank(), world_size()) if is_launched() else None
    if watchdog is not None:
        watchdog.start(peers, global_rank())
    try:
        _serve(config, server, cancelled, peers, position)
    finally:
        if watchdog is not None:
            watchdog.stop()


def _serve(
    config: ServerConfig,
    server: BlockingServer[Work | Cancel] | None,
    cancelled: CancelledIds,
    peers: Peers | None,
    position: Position,
) -> None:
    timeout_s = collective_timeout_s(config)
    runtime = init(timeout_s=timeout_s, peers=peers)
    if runtime.device.type == "cpu":
        # The API must acknowledge requests even while all cores compute.
        os.nice(CPU_NICENESS)
    worker = Worker(build_base(config, runtime, position))
    set_timeouts(timedelta(seconds=timeout_s))
    if config.enable_self_test:
        self_test(worker)
    logger.info("event=worker_ready rank=%d world_size=%d device=%s", runtime.rank, runtime.world_size, runtime.device)
    if server is None:
        follow(worker)
    else:
        lead(worker, server, cancelled, idle_s=idle_s(config))
        server.close()
    shutdown()


@contextmanager
def socket_folder() -> Iterator[Path | None]:
    """A folder for rank 0's socket, or None if there are several hosts; also deleted on SIGTERM."""
    if num_hosts() > 1:
        yield None
        return
    with temporary_folder() as folder:
        owner = os.getpid()

        def end(number: int, frame: object) -> None:
            # Forked children inherit this signal handler.
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
    parser.add_argument("--origins", type=Path, help="JSON file with the lines that errors name [those of --config]")
    parser.add_argument("--bind", help="address that rank 0 listens on [from the configuration]")
    parser.add_argument("--keys", type=Path, help="file with the keys of that channel [in output_dir]")
    parser.add_argument("--signs", type=Path, help="folder for signs of life [none]")
    overrides, rest = split_overrides(sys.argv[1:] if arguments is None else arguments)
    flags = parser.parse_args(rest)
    try:
        loaded = load_server_config(flags.config, overrides)
        if flags.origins is not None:
            loaded = loaded.with_origins(flags.origins)
        config = loaded.config
        # All ranks do the same, so at level INFO only rank 0 logs it.
        is_quiet = global_rank() > 0 and config.log_level == "INFO"
        configure_logging(f"worker{global_rank()}", "WARNING" if is_quiet else config.log_level)
        follow_parent()
        with loaded.citing():
            if flags.bind is not None:
                run(config, flags.bind, None if flags.keys is None else ChannelKeys.load(flags.keys), flags.signs)
            elif global_rank() == 0:
                with socket_folder() as folder:
                    address = bind_address(config, folder)
                    run(config, address, channel_keys(config, address))
            else:
                run(config, "", None)
    except ValueError as error:
        if global_rank() != 0:
            # Usually all ranks fail with the same error. Rank 0 then reports it and exits, and its launcher ends the
            # other ranks before they report it, too.
            time.sleep(ERROR_DELAY_S)
        sys.stderr.write(f"error: {in_server_terms(str(error))}\n")
        return BAD_INPUT
    return 0
