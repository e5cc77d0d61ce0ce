"""`python -m xorl.server.orchestrator`: runs the orchestrator of a configuration until a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import signal
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path

from xorl.config import load_server_config
from xorl.host.alive import AliveFile
from xorl.server.channel import ChannelError
from xorl.server.orchestrator.commit import Damaged, JournalError, OtherVersion
from xorl.server.orchestrator.options import OrchestratorOptions, options_from_config
from xorl.server.orchestrator.orchestrator import Orchestrator
from xorl.server.process import configure_logging
from xorl.server.supervise import BAD_INPUT

logger = logging.getLogger(__name__)


async def serve(options: OrchestratorOptions, signs: Path | None = None) -> None:
    """Run until SIGTERM or SIGINT, then save the models that the workers hold."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    orchestrator = Orchestrator(options)
    await orchestrator.start()
    alive = None if signs is None else asyncio.create_task(AliveFile(signs / "orchestrator").keep_touching())
    try:
        logger.info("event=listening address=%s", orchestrator.address)
        await stopping.wait()
        logger.info("event=stopping")
        await orchestrator.runner.save_models()
    finally:
        # Also after a task failed and stopped the loop: open sockets would keep the process from ending.
        await orchestrator.stop()
        if alive is not None:
            alive.cancel()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the orchestrator and return its exit code: BAD_INPUT, with which it is not restarted, or 1."""
    parser = argparse.ArgumentParser(prog="python -m xorl.server.orchestrator", description=serve.__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the service's resolved configuration")
    parser.add_argument("--bind", required=True, help="address to which the API connects")
    parser.add_argument("--workers", required=True, help="address on which the first worker listens")
    parser.add_argument("--workers-file", type=Path, help="file in which restarted workers publish their address")
    parser.add_argument("--restarts-file", type=Path, help="file in which the launcher counts restarts")
    parser.add_argument("--keys", type=Path, help="file with the keys of the channel to the workers")
    parser.add_argument("--signs", type=Path, help="folder for signs of life")
    flags = parser.parse_args(arguments)
    config = load_server_config(flags.config, []).config
    configure_logging("orchestrator", config.log_level)
    options = options_from_config(
        config,
        api_address=flags.bind,
        worker_address=flags.workers,
        workers_file=flags.workers_file,
        restarts_file=flags.restarts_file,
        keys=flags.keys,
    )
    options.journal_path.parent.mkdir(parents=True, exist_ok=True)
    with options.journal_path.with_suffix(".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.error(
                "event=journal_in_use path=%s: another orchestrator has locked it; stop that one", options.journal_path
            )
            return 1
        try:
            asyncio.run(serve(options, flags.signs))
        except OtherVersion as problem:
            sys.stderr.write(f"error: {problem}\n")
            return BAD_INPUT
        except (sqlite3.OperationalError, sqlite3.ProgrammingError, sqlite3.IntegrityError):
            # Possibly a lock or a full disk, which a restart may resolve; in any case not damage to the file.
            raise
        except (sqlite3.DatabaseError, Damaged) as problem:
            path = options.journal_path
            sys.stderr.write(
                f"error: {path} is damaged ({problem}): restore a copy of it, or move {path.name} and the files beside "
                "it away; checkpoints are kept, but calls since the last checkpoints are lost\n"
            )
            return BAD_INPUT
        except (RuntimeError, ChannelError, JournalError) as problem:
            logger.error("event=cannot_serve why=%r", str(problem))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
