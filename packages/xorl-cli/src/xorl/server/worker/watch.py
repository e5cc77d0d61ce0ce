"""The watchdog of the service's ranks: ends them if they hang, and reports the reason to the launcher."""

from __future__ import annotations

import logging
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from xorl.config import ServerConfig
from xorl.core.runtime import global_rank
from xorl.host.alive import AliveFile
from xorl.host.failures import StalledError
from xorl.server.hangs import Hang, give_notice, silence_s
from xorl.train.watchdog import INTERVAL_S, Position, Watchdog

logger = logging.getLogger(__name__)

EXIT_CODE = 5  # the same as for a stalled run (`xorl.cli.exit_codes`)
# While idle, rank 0 broadcasts an empty message this often. The broadcast times out on the other ranks if rank 0 is
# lost, and reveals ranks that do not take part.
IDLE_S = 10.0


# Used if hang detection is off.
COLLECTIVE_TIMEOUT_S = 1800.0


def watchdog_of(config: ServerConfig, signs: Path | None, position: Position) -> Watchdog | None:
    """The watchdog of this rank; None if `worker_stall_timeout` is null.

    signs: the launcher's folder for signs of life; None if the ranks were not started by it.
    """
    stall_s, lost_s = config.worker_stall_timeout, silence_s(config)
    if stall_s is None or lost_s is None:
        return None
    return Watchdog(
        lambda error: end(error, signs, stall_s),
        stall_s=stall_s,
        # The launcher detects silent ranks; the other ranks only act if it does not.
        lost_s=lost_s if signs is None else 2 * lost_s,
        interval_s=min(INTERVAL_S, lost_s / 5),
        position=position,
        advice="",
    )


def signs_of_life(config: ServerConfig, signs: Path | None) -> AbstractContextManager[None]:
    """Gives the launcher signs of life until the block ends; nothing if `worker_stall_timeout` is null.

    Begins before the ranks meet, since a rank may wait for others that start far more slowly. `signs`: see
    `watchdog_of`.
    """
    if signs is None or config.worker_stall_timeout is None:
        return nullcontext()
    return AliveFile(signs / f"rank {global_rank()}").touching()


def idle_s(config: ServerConfig) -> float:
    """How often rank 0 tells the other ranks that there is nothing to do."""
    return min(IDLE_S, (config.worker_stall_timeout or IDLE_S) / 4)


def collective_timeout_s(config: ServerConfig) -> float:
    """The timeout of collectives, which must not end the ranks before the watchdog has collected their stacks."""
    return max(COLLECTIVE_TIMEOUT_S, 2 * (config.worker_stall_timeout or 0.0))


def end(error: Exception, signs: Path | None, stall_s: float) -> None:
    """End this process. The first rank of the host logs the whole error and gives the launcher notice of it."""
    since = time.time() - stall_s if isinstance(error, StalledError) else time.time()
    reason = "; ".join(str(error).partition("\n\n")[0].splitlines())
    try:
        is_first = signs is None or give_notice(signs, Hang(reason, since, is_logged=True))
    except OSError:  # the launcher has ended, with its folder
        is_first = True
    logger.critical("event=hung why=%s", error if is_first else "see what another rank has logged")
    os._exit(EXIT_CODE)
