"""A rank for the tests of launching: runs the function here that its first argument names, as a real rank does."""

import os
import signal
import sys
import time
from pathlib import Path

from xorl.cli import signals
from xorl.cli.exit_codes import Diverged
from xorl.cli.failures import peer_has_failed
from xorl.cli.rank import RankEnvironment, run_rank
from xorl.config import ConfigError, Problem
from xorl.config.problems import Origin

LONG_S = 60.0  # far beyond what a test waits


def wait_for_file(name: str) -> None:
    while not Path(name).exists():
        time.sleep(0.01)


def reduce_over_gloo(rank: int) -> int:
    import torch  # noqa: PLC0415  (the other ranks start at once without it)
    import torch.distributed as dist  # noqa: PLC0415

    from xorl.core import runtime  # noqa: PLC0415

    runtime.init("cpu")
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    Path(f"sum_{rank}").write_text(f"{int(total)} of {dist.get_world_size()} {os.environ['OMP_NUM_THREADS']}")
    runtime.shutdown()
    return 0


def tell_place(rank: int) -> int:
    Path(f"rank_{rank}").write_text(f"{os.environ['LOCAL_RANK']} of {os.environ['WORLD_SIZE']}")
    return 0


def fail_on_rank_1(rank: int) -> int:
    if rank == 1:
        raise RuntimeError("rank 1 lost its way")
    time.sleep(LONG_S)
    return 0


def fail_in_turn(rank: int) -> int:
    # Rank 1 is first, and rank 0 fails since rank 1 is gone, maybe before the launcher looks.
    if rank == 1:
        raise RuntimeError("the cause")
    environment = RankEnvironment.read()
    while not peer_has_failed(environment.error_file):
        time.sleep(0.001)
    raise ConnectionError("the consequence")


def refuse_input(rank: int) -> int:
    raise ConfigError([Problem(Origin("file", "a.yaml:3", "x: 1", 3), "x", "unknown option")], "a.yaml")


def refuse_input_on_rank_1(rank: int) -> int:
    return refuse_input(rank) if rank == 1 else fail_on_rank_1(rank)


def diverge(rank: int) -> int:
    raise Diverged("step 5: loss nan")


def be_killed(rank: int) -> int:
    # Rank 0 is killed, and rank 1 says so with an error of its own.
    if rank == 0:
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_file("killed")
    raise ConnectionError("rank 0 is gone")


def hang_after_a_failure(rank: int) -> int:
    # As a training loop does, rank 0 takes SIGTERM as a wish to stop soon, and then waits for a peer that is no more.
    if rank == 1:
        wait_for_file("hanging")
        raise RuntimeError("rank 1 lost its way")
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    Path("hanging").touch()
    time.sleep(LONG_S)
    return 0


def fail_on_every_rank(rank: int) -> int:
    # As a save on a full disk does: the ranks agree on what is told.
    from xorl.data import DataFailure  # noqa: PLC0415  (the other ranks start at once without it)

    raise DataFailure("the disk is full\n  rank 0: no space left")


def wait_for_an_interrupted_peer(rank: int) -> int:
    # Rank 1 ends on SIGTERM while it starts; rank 0 waits for it where Python runs no signal handler.
    if rank == 0:
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    return sleep(rank)


def hear_nothing(rank: int) -> int:
    # As in native code: another thread receives the signal, and Python runs no handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signals.CLEAN_UP_S = 0.5
    return sleep(rank)


def sleep(rank: int) -> int:
    Path(f"ready_{rank}").touch()
    time.sleep(LONG_S)
    return 0


def save_when_told(rank: int) -> int:
    # Stops in good order: rank 1 at once, rank 0 after a save that takes a while.
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: received.append(number))
    Path(f"ready_{rank}").touch()
    while not received:
        time.sleep(0.01)
    if rank == 0:
        time.sleep(1.0)
        Path("saved").write_text(str(len(received)))
    return 128 + received[0]


def fail_in_a_library(rank: int) -> int:
    # Rank 1 ends with an error that a library raised, and not with bad input.
    if rank == 1:
        int("x")
    time.sleep(LONG_S)
    return 0


def end_without_a_word(rank: int) -> int:
    if rank == 0:
        os._exit(7)
    time.sleep(60)
    return 0


def main() -> int:
    mode, flag, folder = sys.argv[1:]
    assert flag == "--rank-folder"
    environment = RankEnvironment.read()
    return run_rank(lambda: globals()[mode](environment.rank), environment, folder=Path(folder), with_traceback=False)


if __name__ == "__main__":
    sys.exit(main())
