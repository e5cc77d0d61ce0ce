"""One rank of a job: what its environment says, and the border at which its errors become a record and an exit code."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xorl.cli.exit_codes import BY_SIGNAL, OK, code_of, first_of, text_of
from xorl.cli.failures import note_interruption, note_pid, note_stop, peer_has_failed, write_record
from xorl.cli.signals import leaving_failed_peers, stopping_with_parent, terminable
from xorl.host.temporary import kept


@dataclass(frozen=True)
class RankEnvironment:
    """What torchrun, or whatever else started the ranks, says of this one. `error_file` is where it wants errors."""

    rank: int
    world_size: int
    error_file: Path | None

    @classmethod
    def read(cls) -> "RankEnvironment | None":
        """Returns None when this process was not started as a rank."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        started_by = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR")
        if not all(name in os.environ for name in names) or not any(name in os.environ for name in started_by):
            return None
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(file) if file else None)


def run_alone(run: Callable[[], int], *, with_traceback: bool) -> int:
    """Runs the only rank in this process, prints its error if there is one, and returns the exit code."""
    try:
        with terminable():
            return run()
    except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001  (the border of the process)
        error = first_of(raised)
        print(text_of(error, with_traceback=with_traceback), file=sys.stderr)
        return code_of(error)


def run_rank(run: Callable[[], int], environment: RankEnvironment, *, folder: Path | None, with_traceback: bool) -> int:
    """Runs one rank of a job and returns its exit code.

    An error is recorded for the launcher, which prints the first one of the job; without a launcher that reads records
    it is printed here. `folder` is where `xorl.cli.launch` keeps its notes; None under another launcher. A rank that
    stopped in good order on a signal leaves a note there and ends with 0, since a launcher would take any other code of
    the first rank to stop for a failure and kill those that are not done.
    """
    try:
        with terminable(), leaving_failed_peers(lambda: peer_has_failed(environment.error_file)):
            if folder is None:
                return run()
            with kept(folder) as launcher:
                note_pid(folder, environment.rank)
                with stopping_with_parent(launcher):
                    code = run()
                if code <= BY_SIGNAL:
                    return code
                note_stop(folder, environment.rank, code)
                return OK
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (the border of the process)
        return _failed(first_of(error), environment, with_traceback=with_traceback)


def _failed(error: BaseException, environment: RankEnvironment, *, with_traceback: bool) -> int:
    code, text = code_of(error), text_of(error, with_traceback=with_traceback)
    if isinstance(error, KeyboardInterrupt):
        if environment.error_file is not None:
            note_interruption(environment.error_file)
        return code
    if environment.error_file is None:
        print(f"rank {environment.rank} of {environment.world_size}: {text}", file=sys.stderr)
    else:
        write_record(environment.error_file, error, text=text, code=code)
    sys.stdout.flush()
    sys.stderr.flush()
    # The others wait for this rank in a collective, and the interpreter's own exit may wait for them.
    os._exit(code)
